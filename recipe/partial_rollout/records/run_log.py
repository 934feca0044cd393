"""``run.jsonl``: the events of a run (PR or noPR), an event a line. Each process of the run appends to it.

    run         a process begins, from scratch or from a checkpoint
    begin       the rollout of a step begins (PR)
    round       the rollout of a step: engine calls; groups admitted, filtered and trained. Written after the update
    phase       any other span: training, validation, weight sync, ...
    checkpoint  the checkpoint of a step is complete
    ended       the process ends because the training is over or was stopped, not by an error

A process may resume from a checkpoint of an earlier step. Readers then ignore the later rounds of the processes before
it (``tools/reading/lineage``). A killed process can leave its last line unfinished (torn); the next process begins a
new line. Times are unix seconds.
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
"""names of the run's files; the second is verl's log, a line ``{"step": int, "data": {...}}`` a step"""


# -- engine calls and trained groups -----------------------------------------------------------------------------------


class EngineCall(Struct, frozen=True, array_like=True, gc=False):
    """One request to a replica, as the worker that sent it saw it; in ``run.jsonl`` a list of the fields, in order.

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
    """policy version of the replica when the call ended; -1 if the replica did not report it"""
    resumed_tokens: int = 0
    """tokens that an engine had read or made before, and that this call prefilled again: after an interruption, or
    after a tool. Tokens still in the KV cache do not count"""
    context_tokens: int = 0
    """tokens of its prompt, which includes the sample's tokens so far; 0 if not recorded"""
    queued_s: float = 0.0
    """seconds that it waited in the engine before it was first scheduled; 0 if the replica does not report it"""
    sample: str = ""
    """the sample: ``epoch/position#index`` under PR, verl's request id under noPR; "" if not recorded"""
    interrupted: bool = False
    """whether the engine aborted it, so that the sample resumes with another call"""
    waited_s: float = 0.0
    """seconds before ``start`` that its sample waited for a slot, or for the worker's gate; 0 under noPR"""

    @property
    def busy_from(self) -> float:
        """Unix seconds at which it began to run in its engine. A call in the engine's queue counts as an empty slot."""
        return min(self.start + self.queued_s, self.end)


class RolloutPhase(Struct, frozen=True):
    """The time span of a round, and its engine calls.

    The span lasts from the start of the round until every replica is quiet; under separate placement from batch to
    batch, and the calls are those that ended in it.
    """

    start: float
    """unix seconds"""
    end: float
    calls: Collection[EngineCall]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def column(self, name: str) -> np.ndarray:
        """Return attribute ``name`` of each call, as an array [call]."""
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
    """Return an identifier of a dataset row, made of its prompt and its ``index``; the same in every run, PR or noPR.

    Images are identified by the bytes of their files.
    """
    # noPR has them opened, and the repr of an opened image is its address.
    digest = hashlib.sha1(repr(list(closed(row.get(MESSAGES, [])))).encode()).hexdigest()[:12]
    # A lone surrogate, which a row may hold, has no UTF-8.
    return f"{row.get('index', 0)}-{digest}".encode(errors="backslashreplace").decode()


class TrainedGroup(Struct, frozen=True, kw_only=True):
    """A trained group; lists have one entry a sample."""

    uid: Uid
    """under noPR the position is that in verl's batches"""
    order: Count
    """dispatch order over the whole run, from 0"""
    prompt: str
    """``prompt_identity`` of its row"""
    birth: Count | None = None
    """policy version under which its first sample started; None: not recorded"""
    lengths: list[Count]
    """response tokens"""
    staleness: list[Count]
    """version from which the update starts, minus that of the sample's oldest token; 0 without tokens"""
    segments: list[Count]
    """engine calls of each sample; a call that was held counts once for each version"""
    tokens: Count
    """tokens generated by the model, in all samples"""
    off_policy_tokens: Count = 0
    """those of ``tokens`` that were sampled by weights older than those from which the update starts"""
    masked: Count = 0
    """samples that used up their retries"""
    more_rows: Count = 0
    """rows of the batch beyond one a sample; an agent loop that returned several outputs has several rows"""

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.staleness) == len(self.segments):
            raise ValueError(
                f"group {self.order} has lists of different lengths: "
                "lengths, staleness and segments must have one entry a sample"
            )

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
        """Number of rows of the batch that its samples have."""
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
    """A process of the run begins: the settings that readers of its events need."""

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
    """its version"""
    vllm: str
    """its version"""
    untested: str = ""
    """one line that says what the run lacks because ``vllm`` is not a tested version; "" if it is a tested one"""
    overtake: float | None = None
    """``partial_rollout.scheduling.overtake``, a share of N; None: no limit, and under noPR"""
    trainer: str = ""
    """strategy of verl's actor: fsdp, fsdp2, megatron; "" in logs of an earlier version of the recipe"""
    placement: str = "colocated"
    """``partial_rollout.placement``"""
    epoch_prompts: Positive
    """prompts trained in an epoch"""
    total: Count
    """prompts that the whole training trains, in all its epochs"""
    offered: Count
    """prompts that may be admitted: more than ``total`` if the training ends with prompts in flight (``drain=False``)
    or filters groups"""
    filters: bool = False
    """whether groups may be filtered: then more than ``total`` prompts are consumed, of which ``total`` are trained"""
    drains: bool = True
    """whether nothing is left in flight once the training reaches its last step"""
    resumed: Count = 0
    """step of the checkpoint from which the process resumed; 0: from scratch"""

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
    """The rollout phase of ``step``, and the groups that it trained, admitted and filtered."""

    step: Positive
    phase: RolloutPhase
    trained: Sequence[TrainedGroup]
    admitted: Sequence[Uid] = ()
    """uids of the groups admitted, in dispatch order. This field and those below have their defaults under noPR"""
    filtered: Sequence[FilteredGroup] = ()
    """groups consumed by dynamic sampling without being trained"""
    interrupt_s: float | None = None
    """seconds from the decision to interrupt until every engine was quiet; None under separate placement"""
    resume_s: float | None = None
    """seconds from the opening of the round to its first engine call; None under separate placement"""
    carried_groups: Count = 0
    """groups that were ACTIVE or READY when the round began"""
    lost_samples: Count = 0
    """samples of the run so far that were admitted and are neither in flight nor trained nor filtered: always 0"""
    lost_tokens: Count = 0
    """``Counters.lost_tokens`` of the whole run so far"""

    @property
    def version(self) -> int:
        """Policy version before the update."""
        return self.step - 1


PhaseName = Literal["train", "validate", "sync", "wait", "stage", "hold", "flush"]
"""Kinds of ``Phase``; only separate placement has ``wait``, ``stage``, ``hold`` and ``flush``::

    train     from the end of a step's rollout until its log, or its validation if that is first. Under separate
              placement the step's sync, stage and hold are part of it
    validate  a validation
    sync      a weight sync, from its start until the last replica has the new weights
    wait      the trainer waits for its batch
    stage     the trainer hands over new weights while the engines decode
    hold      the engines are held to load the weights, from the request to hold them until they resume
    flush     the engines are interrupted for a checkpoint, until they resume
"""


class Phase(_Event, frozen=True, tag="phase"):
    """A phase that is not a rollout."""

    name: PhaseName
    step: int
    """the step; of a ``sync``, ``stage`` or ``hold``, the policy version that is loaded (step s makes version s)"""
    start: float
    end: float


class Checkpoint(_Event, frozen=True, tag="checkpoint"):
    """The checkpoint of ``step`` is complete."""

    step: Count


class Ended(_Event, frozen=True, tag="ended"):
    """The process ends after ``step``: the training is over, or was stopped."""

    step: Count
    complete: bool
    """True: the training is over; False: it was stopped before its last step"""
    exhausted: bool = False
    """whether the training is over early, because the data could not fill another batch"""


Event = RunSettings | Begin | Round | Phase | Checkpoint | Ended


class _Logged(Struct):
    step: int


def logged_steps(metrics: Path) -> list[tuple[int, bytes]]:
    """Return step number and text of each line of the run's file ``metrics``; torn lines are left out."""
    found = []
    for line in metrics.read_bytes().splitlines() if metrics.exists() else ():
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found.append((msgspec.json.decode(line, type=_Logged).step, line))
    return found


class RunLog:
    """Appends events to the log of one run directory (made if missing); each is in the file as soon as it is added.

    Args:
        settings: the settings of the process that begins; the first event that is appended.
        replicas: server ids (addresses), in replica order; the log has a replica's index instead.
    """

    def __init__(self, directory: Path, settings: RunSettings, replicas: Sequence[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._index: dict[str | int, int] = {}
        self.use_replicas(replicas)
        self.last_round: Round | None = None
        """the last round that this process has added; its calls have replica indices; None before the first one"""
        self._file = (directory / NAME).open("a+b")
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                # A killed process left a line without its end.
                self._file.write(b"\n")
        self.add(settings)

    def use_replicas(self, replicas: Sequence[str]) -> None:
        """Set the server ids of the replicas, in replica order, for the rounds that follow."""
        self._index.update({address: i for i, address in enumerate(replicas)})

    def round(self, round_: Round) -> None:
        """Append a round. Its calls name replicas by server id (``use_replicas``); the log gets their indices."""
        calls = [structs.replace(call, replica=self._index[call.replica]) for call in round_.phase.calls]
        self.last_round = structs.replace(round_, phase=structs.replace(round_.phase, calls=calls))
        self.add(self.last_round)

    def add(self, event: Event, *, sync: bool = False) -> None:
        """Append an event. With ``sync`` return only once this and all lines before it are on disk (fsync).

        ``round`` adds a ``Round``.
        """
        self._file.write(msgspec.json.encode(event) + b"\n")
        # Into the file at once: a process that is killed loses what Python still buffers.
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
