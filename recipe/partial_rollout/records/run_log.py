"""``run.jsonl``: what happened in a run of either arm, an event a line. Each process of the run appends to it.

    run         a process begins, from scratch or from a checkpoint
    begin       the rollout of a step begins
    round       its engine calls, and the groups that it admitted, filtered and trained; written after the update
    phase       any other span: training, validation, weight sync, ...
    checkpoint  the checkpoint of a step is whole
    ended       the process ends on purpose

A process that resumes undoes what is beyond its checkpoint (``tools/reading/lineage``). The writer ends every line before
it begins the next, so each process can leave one torn line, its last. Times are unix seconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, structs

from recipe.partial_rollout.config.choices import Placement
from recipe.partial_rollout.manager.types import FilteredGroup
from recipe.partial_rollout.records.calls import RolloutPhase
from recipe.partial_rollout.records.trained_group import Count, TrainedGroup, Uid

NAME, METRICS = "run.jsonl", "metrics.jsonl"
"""the run's files; the second is verl's log of the steps, ``{"step": int, "data": {...}}`` a line"""

Positive = Annotated[int, Meta(ge=1)]


class Arm(StrEnum):
    """Which trainer ran."""

    NOPR = "noPR"
    PR = "PR"


class _Event(Struct, frozen=True, tag_field="event"):
    pass


class RunSettings(_Event, frozen=True, tag="run", kw_only=True):
    """A process begins: what a reader of its events must know."""

    arm: Arm
    experiment: str
    batch_groups: Positive
    """groups that one step trains (N)"""
    samples_per_group: Positive
    """samples in one group (n)"""
    replicas: Positive
    slots_per_replica: Positive
    """samples that one replica can run at a time"""
    max_staleness: Count
    """0 under noPR"""
    mode: str
    policy: str
    verl: str
    """version"""
    vllm: str
    """version"""
    overtake: float | None = None
    """``partial_rollout.scheduling.overtake``, a share of N; None: no limit, and under noPR"""
    trainer: str = ""
    """strategy of verl's actor: fsdp, fsdp2, megatron; "": an earlier version of the recipe did not note it"""
    placement: str = "colocated"
    """``partial_rollout.placement``"""
    epoch_prompts: Positive
    """prompts trained in an epoch"""
    total: Count
    """prompts that the whole training trains, over its epochs"""
    offered: Count
    """prompts that may be admitted: more than ``total`` if the training ends with prompts in flight (``drain=False``)
    or filters groups"""
    filters: bool = False
    """whether groups may be filtered: then more than ``total`` prompts are consumed, of which ``total`` are trained"""
    drains: bool = True
    """whether nothing is left in flight once the training reaches its last step"""
    resumed: Count = 0
    """step of the checkpoint that it goes on from; 0: from scratch"""

    @property
    def separate(self) -> bool:
        """Whether the engines decode while the trainer updates; a round's span is then the time from batch to batch."""
        return self.placement == Placement.SEPARATE

    @property
    def full_concurrency(self) -> int:
        """Running samples when no slot is wasted: a whole batch, or all slots if the batch is larger."""
        return min(self.batch_groups * self.samples_per_group, self.replicas * self.slots_per_replica)


class Begin(_Event, frozen=True, tag="begin"):
    """The rollout of ``step`` begins."""

    step: Count
    start: float


class Round(_Event, frozen=True, tag="round", kw_only=True):
    """The rollout phase of ``step``, and what became of its groups."""

    step: Positive
    phase: RolloutPhase
    trained: Sequence[TrainedGroup]
    admitted: Sequence[Uid] = ()
    """groups, in order; PR, as is all that follows"""
    filtered: Sequence[FilteredGroup] = ()
    """consumed by dynamic sampling without being trained"""
    interrupt_s: float | None = None
    """seconds from the decision to interrupt until every engine was quiet"""
    resume_s: float | None = None
    """seconds from the opening of the round to its first engine call"""
    carried_groups: Count = 0
    """unfinished groups that it started with"""
    lost_samples: Count = 0
    """samples unaccounted for so far, not only in this round"""

    @property
    def version(self) -> int:
        """Policy version before the update."""
        return self.step - 1


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


class Phase(_Event, frozen=True, tag="phase"):
    """A phase that is not a rollout."""

    name: str
    """a ``PhaseName``"""
    step: int
    """or, of a ``sync``, the policy version"""
    start: float
    end: float


class Checkpoint(_Event, frozen=True, tag="checkpoint"):
    """The checkpoint of ``step`` is whole."""

    step: Count


class Ended(_Event, frozen=True, tag="ended"):
    """The process ends on purpose after ``step``."""

    step: Count
    complete: bool
    """whether the training is over"""
    exhausted: bool = False
    """whether it is over because the data could not fill another batch"""


Event = RunSettings | Begin | Round | Phase | Checkpoint | Ended


class RunLog:
    """Appends events to the log of one run directory (made if missing); each is in the file as soon as it is added.

    Args:
        settings: of the process that begins.
        replicas: server ids, in replica order; a call is noted under its replica's index.
    """

    def __init__(self, directory: Path, settings: RunSettings, replicas: Sequence[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._index: dict[str | int, int] = {}
        self.use_replicas(replicas)
        self.last_round: Round | None = None
        """the round noted last, its replicas by index"""
        self._file = (directory / NAME).open("a+b")
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                # A killed process left a line without its end.
                self._file.write(b"\n")
        self.add(settings)

    def use_replicas(self, replicas: Sequence[str]) -> None:
        """From here on the replicas have these server ids, in replica order."""
        self._index.update({address: i for i, address in enumerate(replicas)})

    def round(self, round_: Round) -> None:
        """Add a round, whose calls name their replicas by server id; it must know these."""
        calls = [structs.replace(call, replica=self._index[call.replica]) for call in round_.phase.calls]
        self.last_round = structs.replace(round_, phase=structs.replace(round_.phase, calls=calls))
        self.add(self.last_round)

    def add(self, event: Event, *, sync: bool = False) -> None:
        """Add any other event; ``sync``: every line is on disk afterwards."""
        self._file.write(msgspec.json.encode(event) + b"\n")
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
