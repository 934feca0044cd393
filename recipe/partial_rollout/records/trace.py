"""``trace.jsonl``: what each round of a run cost, and what it trained; ``run.json``: how the run was set up.

Times are unix seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from recipe.partial_rollout.config.choices import Placement
from recipe.partial_rollout.records.calls import RolloutPhase
from recipe.partial_rollout.records.jsonl import (
    Checkpoint,
    JsonLines,
    Positive,
    Resumed,
    event_line,
)
from recipe.partial_rollout.records.trained_group import TrainedGroup

RUN, TRACE = "run.json", "trace.jsonl"


class Arm(StrEnum):
    """Which trainer ran."""

    NOPR = "noPR"
    PR = "PR"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a reader of the run's other files must know."""

    arm: Arm
    experiment: str
    batch_groups: Positive
    """groups that one step trains (N)"""
    samples_per_group: Positive
    """samples in one group (n)"""
    replicas: Positive
    slots_per_replica: Positive
    """samples that one replica can run at a time"""
    max_staleness: int | None
    mode: str
    policy: str
    verl: str
    """version"""
    vllm: str
    """version"""
    overtake: float | None = None
    """``partial_rollout.scheduling.overtake``, a share of N; None: no limit, and under noPR"""
    placement: str = "colocated"
    """``partial_rollout.placement``"""
    complete: bool = False
    """whether the training reached its end"""

    @property
    def separate(self) -> bool:
        """Whether the engines decode while the trainer updates; a round's span is then the time from batch to batch."""
        return self.placement == Placement.SEPARATE

    @property
    def full_concurrency(self) -> int:
        """Running samples when no slot is wasted: a whole batch, or all slots if the batch is larger."""
        return min(self.batch_groups * self.samples_per_group, self.replicas * self.slots_per_replica)

    def write(self, directory: Path) -> None:
        """Write ``run.json`` in the run's directory."""
        (directory / RUN).write_text(json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class Begin:
    """The rollout of ``step`` begins."""

    EVENT: ClassVar[str] = "begin"
    step: int
    start: float


class PhaseName(StrEnum):
    """What a ``Phase`` is; ``WAIT`` to ``FLUSH`` are of separate placement."""

    TRAIN = "train"
    """from the batch to the log; under separate placement the sync, staging and hold of the step lie in it"""
    VALIDATE = "validate"
    SYNC = "sync"
    """new weights on their way to the replicas, from the trainer to the last replica"""
    WAIT = "wait"
    """the trainer waits for its batch"""
    STAGE = "stage"
    """new weights leave the trainer while the engines decode"""
    HOLD = "hold"
    """all engines are held, from the request to the resumption, while they load the weights"""
    FLUSH = "flush"
    """the engines are stopped for a checkpoint"""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase that is not a rollout."""

    EVENT: ClassVar[str] = "phase"
    name: str
    """a ``PhaseName``; another version of the recipe may have others"""
    step: int
    """or, of a ``sync``, the policy version"""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A rollout phase and the groups that it trains."""

    EVENT: ClassVar[str] = "round"
    step: int
    version: int
    """policy version that the engines held"""
    phase: RolloutPhase
    trained: Sequence[TrainedGroup] = field(repr=False)
    interrupt_s: float | None = None
    """seconds from the decision to interrupt until every engine was quiet; None if the arm does not interrupt"""
    resume_s: float | None = None
    """seconds from the opening of the round to its first engine call; None if the arm does not interrupt"""
    carried_groups: int = 0
    """unfinished groups that it started with"""
    lost_samples: int = 0
    """samples unaccounted for so far, not only in this round"""
    at: int = field(default=0, repr=False, compare=False)
    """byte of the trace at which its line begins, if it was read"""

    def to_json(self) -> dict[str, Any]:
        """Its line, without the event's name."""
        return {
            "calls": [call.to_json() for call in self.phase.calls],
            "step": self.step,
            "version": self.version,
            "start": self.phase.start,
            "end": self.phase.end,
            "interrupt_s": self.interrupt_s,
            "resume_s": self.resume_s,
            "trained": [group.to_trace() for group in self.trained],
            "carried_groups": self.carried_groups,
            "lost_samples": self.lost_samples,
        }


TraceEvent = Begin | RoundRecord | Phase | Checkpoint | Resumed


class RunTrace:
    """Appends to the trace of one run directory, and keeps its ``run.json``.

    Args:
        directory: of the run; created if missing.
        replicas: server ids, in replica order; a call is noted under its replica's index.
        resumed_step: the step that the run continues from; events of later steps are undone (0: all of them).
    """

    def __init__(self, directory: Path, replicas: list[str], run: RunSettings, resumed_step: int = 0) -> None:
        self._directory, self._run = directory, run
        self._index: dict[str | int, int] = {address: i for i, address in enumerate(replicas)}
        self._lines = JsonLines(directory / TRACE)
        self.last_round: RoundRecord | None = None
        """the round noted last, its replicas by index"""
        self._run.write(directory)
        if self._lines.continues:
            self._lines.add(to_json(Resumed(resumed_step)))

    def use_replicas(self, replicas: list[str]) -> None:
        """From here on the replicas have these server ids, in replica order."""
        self._index.update({address: i for i, address in enumerate(replicas)})

    def complete(self) -> None:
        """Note that the training reached its last step."""
        self._run = replace(self._run, complete=True)
        self._run.write(self._directory)

    def begin(self, step: int) -> None:
        """The rollout of ``step`` begins."""
        self._lines.add(to_json(Begin(step, time.time())))

    def round(self, round_: RoundRecord) -> None:
        """Note one rollout phase and what it trains; the trace must know the replicas of its calls."""
        calls = tuple(replace(call, replica=self._index[call.replica]) for call in round_.phase.calls)
        self.last_round = replace(round_, phase=replace(round_.phase, calls=calls))
        self._lines.add(to_json(self.last_round))

    def phase(self, name: str, step: int, start: float, end: float) -> None:
        """Note a phase that is not a rollout; ``name`` is a ``PhaseName``."""
        self._lines.add(to_json(Phase(name, step, start, end)))

    def checkpoint(self, step: int) -> None:
        """Note that the checkpoint of ``step`` is whole, and sync every line to disk."""
        self._lines.add(to_json(Checkpoint(step)))
        self._lines.sync()


def to_json(event: Begin | RoundRecord | Phase | Checkpoint | Resumed) -> dict[str, Any]:
    """The event's line."""
    if isinstance(event, RoundRecord):
        return {"event": event.EVENT, **event.to_json()}
    return event_line(event)
