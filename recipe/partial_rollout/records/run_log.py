"""``run.jsonl``: what happened in a run of either arm, an event a line. Each process of the run appends to it.

    run         a process begins, from scratch or from a checkpoint
    begin       the rollout of a step begins (PR)
    round       its engine calls, and the groups that it admitted, filtered and trained; written after the update
    phase       any other span: training, validation, weight sync, ...
    checkpoint  the checkpoint of a step is complete
    ended       the process ends on purpose

A process that resumes undoes what is beyond its checkpoint (``tools/reading/lineage``). The writer ends every line before
it begins the next, so each process can leave one torn line, its last. Times are unix seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta, Struct, structs

from recipe.partial_rollout.checkpoint.row_images import MESSAGES, closed
from recipe.partial_rollout.config.settings import Placement
from recipe.partial_rollout.manager.types import FilteredGroup, TakenGroup, position_of

NAME, METRICS = "run.jsonl", "metrics.jsonl"
"""the run's files; the second is verl's log of the steps, ``{"step": int, "data": {...}}`` a line"""


# -- engine calls and trained groups -----------------------------------------------------------------------------------


class EngineCall(Struct, frozen=True, array_like=True, gc=False):
    """One request to a replica, as its client saw it; in ``run.jsonl`` a list of the fields in their order.

    >>> call = EngineCall("10.0.0.1:8000", start=0.0, end=10.0, tokens=40, version=3, queued_s=2.0)
    >>> call.busy_from
    2.0
    """

    replica: str | int
    """the replica's address; in ``run.jsonl`` its index"""
    start: float
    """unix seconds"""
    end: float
    tokens: int
    """decoded by this call"""
    version: int
    """policy version that the replica held; -1 if it did not say"""
    resumed_tokens: int = 0
    """tokens that it prefilled again after an interruption, or after a tool; those still cached do not count"""
    context_tokens: int = 0
    """prompt and response tokens that it started from; 0 if not noted"""
    queued_s: float = 0.0
    """seconds that it waited in the engine before it was first scheduled; 0 if the replica does not say"""
    sample: str = ""
    """the sample: ``epoch/position#index`` under PR, verl's request id under noPR; "" if not noted"""
    interrupted: bool = False
    """whether the engine aborted it, so that the sample resumes with another call"""
    waited_s: float = 0.0
    """seconds before ``start`` that its sample waited for a slot in an open round; 0 if not noted, and under noPR"""

    @property
    def busy_from(self) -> float:
        """When it began to run in its engine (unix seconds); while it queues it makes no token and its slot is empty."""
        return min(self.start + self.queued_s, self.end)


class RolloutPhase(Struct, frozen=True):
    """A time span from the start of a round until every replica is quiet, and its engine calls."""

    start: float
    """unix seconds"""
    end: float
    calls: Collection[EngineCall]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def column(self, name: str) -> np.ndarray:
        """[call] attribute ``name`` of each"""
        columns = getattr(self.calls, "column", None)
        return columns(name) if columns else np.array([getattr(call, name) for call in self.calls])

    @property
    def decoded_tokens(self) -> int:
        return int(self.column("tokens").sum())


Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Uid = Annotated[str, Meta(pattern=r"^\d{1,9}/\d{1,9}$")]
"""``epoch/position``"""


def prompt_identity(row: dict[str, Any]) -> str:
    """Identifier of a dataset row, made of its prompt and its index in the file; the same in every run and arm.

    Images count by the bytes of their files.
    """
    # noPR has them opened, and the repr of an opened image is its address.
    digest = hashlib.sha1(repr(list(closed(row.get(MESSAGES, [])))).encode()).hexdigest()[:12]
    # A lone surrogate, which a row may hold, has no UTF-8.
    return f"{row.get('index', 0)}-{digest}".encode(errors="backslashreplace").decode()


class TrainedGroup(Struct, frozen=True, kw_only=True):
    """A prompt with its samples; lists have one entry a sample."""

    uid: Uid
    """under noPR the position is that in verl's batches"""
    order: Count
    """dispatch order over the whole run, from 0"""
    prompt: str
    """``prompt_identity`` of its row"""
    birth: Count | None = None
    """policy version under which its first sample started; None: not noted"""
    lengths: list[Count]
    """response tokens"""
    staleness: list[Count]
    """versions from each sample's first generated token to the update that trains it; 0 without tokens"""
    segments: list[Count]
    """engine calls; a call that was held counts once for each version"""
    tokens: Count
    """tokens generated by the model, in all samples"""
    off_policy_tokens: Count = 0
    """tokens of these that were made by weights older than those that the update starts from"""
    masked: Count = 0
    """samples that used up their retries"""
    more_rows: Count = 0
    """rows of the batch beyond one for each sample: of agent loops that returned several outputs"""

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.staleness) == len(self.segments):
            raise ValueError(f"group {self.order} has lists of different lengths, one entry a sample each")

    @classmethod
    def of(cls, group: TakenGroup, version: int) -> Self:
        """The record of ``group``, which the update on the weights of ``version`` trains."""
        outputs = group.outputs
        return cls(
            uid=group.uid,
            order=group.order,
            prompt=prompt_identity(group.row),
            birth=group.birth,
            lengths=[output.response_length for output in outputs],
            staleness=[output.staleness(version) for output in outputs],
            segments=[output.segments for output in outputs],
            tokens=sum(len(output.generated) for output in outputs),
            off_policy_tokens=int(sum((output.generated < version).sum() for output in outputs)),
            masked=sum(output.masked for output in outputs),
            more_rows=len(group.rows) - len(outputs),
        )

    @property
    def rows(self) -> int:
        """Rows of the batch that are its samples'."""
        return len(self.lengths) + self.more_rows

    @property
    def epoch(self) -> int:
        return position_of(self.uid)[0]


# -- events ------------------------------------------------------------------------------------------------------------


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
    untested: str = ""
    """what the run does without, in one line, where that vLLM is not a tested one; "" where it is"""
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
    """groups that had started when it began, and were not trained"""
    lost_samples: Count = 0
    """samples unaccounted for so far, not only in this round"""
    lost_tokens: Count = 0
    """decoded so far for conversations that began anew (``Counters.lost_tokens``)"""

    @property
    def version(self) -> int:
        """Policy version before the update."""
        return self.step - 1


PhaseName = Literal["train", "validate", "sync", "wait", "stage", "hold", "flush"]
"""Kinds of ``Phase``; ``wait`` to ``flush`` are of separate placement::

    train     from the batch to the log; under separate placement the sync, staging and hold of the step lie in it
    sync      new weights on their way to the replicas, from the trainer to the last replica
    wait      the trainer waits for its batch
    stage     new weights leave the trainer while the engines decode
    hold      all engines are held, from the request to the resumption, while they load the weights
    flush     the engines are stopped for a checkpoint
"""


class Phase(_Event, frozen=True, tag="phase"):
    """A phase that is not a rollout."""

    name: PhaseName
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


class _Logged(Struct):
    step: int


def logged_steps(metrics: Path) -> list[tuple[int, bytes]]:
    """Step and text of each line of the run's file ``metrics``; torn lines are left out."""
    found = []
    for line in metrics.read_bytes().splitlines() if metrics.exists() else ():
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found.append((msgspec.json.decode(line, type=_Logged).step, line))
    return found


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
        # Into the file at once: a process that is killed loses what Python still buffers.
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
