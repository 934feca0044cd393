"""Records of the recipe: prompt, group, sample, segment; and the messages that carry them.

The states of samples and groups are enum fields. Only ``Samples`` writes those of samples, only ``Groups`` the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from recipe.partial_rollout.waits import ErrorText


class SampleState(StrEnum):
    WAITING = "waiting"
    """Has no tokens and runs nowhere."""
    RUNNING = "running"
    """A worker holds a slot for it."""
    PARKED = "parked"
    """Has no slot and lives on in its worker, which awaits a tool or its reward. Then it needs a slot, or ends."""
    INTERRUPTED = "interrupted"
    """Gave its slot back before it ended, and waits for another one; its tokens are cached."""
    FINISHED = "finished"
    FAILED = "failed"
    """Its agent loop, reward or engine call failed. It awaits a retry, unless it is masked at once or ends the run."""


class GroupState(StrEnum):
    WAITING = "waiting"
    """No sample has started."""
    ACTIVE = "active"
    """Some sample has started, and some has not finished."""
    READY = "ready"
    """Every sample has finished."""
    TAKEN = "taken"
    """The trainer has it and has not acknowledged it."""
    TRAINED = "trained"
    FILTERED = "filtered"
    """All its samples have the same score: consumed without being trained (``FilterSettings``)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens that one engine call added to a sample under one version.

    An engine call that was held during weight syncs has a segment for each version (``engine/hold.py``).
    """

    token_ids: np.ndarray
    """int32 [segment_length]"""
    log_probs: np.ndarray
    """float32 [segment_length]; under the version that sampled the tokens, at the sampling temperature"""
    version: int
    """policy version that made the tokens"""
    stop_reason: str | None = None
    """the engine's stop reason if this segment ends the turn; None if an interruption or a hold cut the turn here"""
    turn: int = 0
    """number of its turn in the sample, from 0, in the order in which turns began; turns may run concurrently"""
    request_digest: str = ""
    """digest of the prompt and the sampling parameters of its turn (``live_sample.digest_of``)"""

    def __post_init__(self) -> None:
        if self.token_ids.shape != self.log_probs.shape:
            raise RuntimeError(
                f"segment with {self.token_ids.shape[0]} tokens and {self.log_probs.shape[0]} log-probs: "
                f"the engine must return one log-prob per token (rollout.calculate_log_probs=True)"
            )
        # One nan would make the loss of the whole batch nan.
        if not (finite := np.isfinite(self.log_probs)).all():
            first = int(finite.argmin())
            raise RuntimeError(
                f"the engine gave {self.log_probs[first]} as the log-prob of token {self.token_ids[first]}, which is "
                "not finite: check the model's weights and the engine's precision (rollout.dtype)"
            )

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """A finished sample, unpadded. ``R`` is its response length: generated and tool tokens.

    Each output that an agent loop returns is trained as a row. This record is the row of the last output, which was
    scored; ``earlier`` has the rows of the outputs before it, with the same score. The state machine sees one sample.
    """

    prompt_ids: np.ndarray
    """int32 [prompt_length]"""
    response_ids: np.ndarray
    """int32 [R]"""
    response_mask: np.ndarray
    """int8 [R]; 1 where the model generated the token"""
    log_probs: np.ndarray
    """float32 [R]; behaviour log-probs, 0 where the mask is 0"""
    versions: np.ndarray
    """int32 [R]; policy version of each generated token, -1 where the mask is 0"""
    segments: int
    """number of the sample's segments: one for each engine call, or for each version that made tokens of a held call"""
    reward_score: float | None
    reward_extra_info: dict[str, Any]
    num_turns: int
    metrics: dict[str, float]
    """verl's agent-loop metrics (seconds), and ``untrained_tokens``: tokens decoded for it that no row trains"""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    masked: bool = False
    """whether this replaces a sample that has used up its retries: mask all 0, no reward, ``prompt_ids`` empty"""
    images: tuple[int | bytes, ...] = ()
    """images that its tokens show, in order: an image of the dataset row as its index there, any other as a PNG file"""
    earlier: tuple[SampleOutput, ...] = ()
    """rows of the outputs that the agent loop returned before this one, in that order"""

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.response_mask), len(self.log_probs), len(self.versions)}
        if len(lengths) != 1:
            raise RuntimeError(
                f"sample with {len(self.response_ids)} tokens, {len(self.response_mask)} mask entries, "
                f"{len(self.log_probs)} log-probs and {len(self.versions)} versions: these numbers must be equal"
            )

    @property
    def rows(self) -> tuple[SampleOutput, ...]:
        """Return the rows that the sample trains, in the order in which its agent loop returned them.

        They are the rows of ``earlier``, then this one with an empty ``earlier``.
        """
        return (*self.earlier, replace(self, earlier=())) if self.earlier else (self,)

    @property
    def response_length(self) -> int:
        """Response tokens of all rows together."""
        return sum(len(row.response_ids) for row in (*self.earlier, self))

    @property
    def generated(self) -> np.ndarray:
        """int32 [G]: policy versions of the G generated tokens of all rows, row after row."""
        return np.concatenate([row.versions[row.response_mask.astype(bool)] for row in (*self.earlier, self)])

    def staleness(self, version: int) -> int:
        """Return ``version``, from which the update starts, minus the version of the oldest token; 0 without tokens."""
        generated = self.generated
        # Rows come in any order: a loop may return a branch that began last before the others.
        return int(version - generated.min()) if len(generated) else 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row of one epoch."""

    uid: str
    """``epoch/position``, both from 0; position counts the rows in the order in which the epoch reads them"""
    row: dict[str, Any]
    """non-tensor fields of verl's dataset row"""


def position_of(uid: str) -> tuple[int, int]:
    """Return epoch and position of a prompt's uid. Sorted by both, prompts are in the order of the source."""
    epoch, position = uid.split("/")
    return int(epoch), int(position)


@dataclass(slots=True)
class Sample:
    """One response of a group."""

    id: str
    """``GROUP_UID#INDEX``, such as ``0/7#2``"""
    group: PromptGroup
    state: SampleState = SampleState.WAITING
    """written by ``Samples`` alone"""
    worker: str | None = None
    """the worker that runs it or holds its live conversation; None: no worker has it"""
    segments: list[Segment] = field(default_factory=list)
    """segments that workers have reported, oldest first; empty once it has finished"""
    failures: int = 0
    """failures of its agent loop or reward"""
    error: str | None = None
    """error of the last failure, in one line"""
    output: SampleOutput | None = None
    """None until it has finished, and again once its group is READY (``PromptGroup.stored``)"""
    since: float = 0.0
    """clock reading (s) of the last state change"""

    @property
    def cached_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    @property
    def lasting_segments(self) -> list[Segment]:
        """Segments from which another worker can continue: all of a single-turn sample, none of a multi-turn one.

        The prompt of a second turn has tool answers, which only the agent loop knows.
        """
        return [] if any(segment.turn for segment in self.segments) else self.segments


@dataclass(slots=True, eq=False)
class PromptGroup:
    """A prompt and its samples: the unit that is admitted and trained."""

    prompt: Prompt
    order: int
    """dispatch order over the whole run, from 0"""
    samples: list[Sample] = field(default_factory=list)
    state: GroupState = GroupState.WAITING
    """written by ``Groups`` alone, as are the next three fields"""
    birth: int | None = None
    """policy version under which its first sample started; None while WAITING"""
    unfinished: int = 0
    """samples that have not finished"""
    finished_length: int = 0
    """sum of the finished samples' response lengths, tokens"""
    stored: Any = None
    """the store's reference to the outputs of its samples while it is READY or TAKEN; else None"""

    @property
    def length(self) -> int:
        """Response tokens of all samples so far."""
        return self.finished_length + sum(sample.cached_tokens for sample in self.samples)

    @property
    def uid(self) -> str:
        return self.prompt.uid

    @property
    def outputs(self) -> list[SampleOutput]:
        """Outputs of the samples that have finished; empty once the group is READY, when the store has them."""
        return [sample.output for sample in self.samples if sample.output is not None]

    @property
    def mean_finished_length(self) -> float:
        """Mean response length of the finished samples, tokens; 1e9 if none has finished, which sorts last."""
        finished = len(self.samples) - self.unfinished
        return self.finished_length / finished if finished else 1e9

    def drop_outputs(self) -> None:
        """Drop the outputs and the store's reference, so that their memory is freed now.

        Group and samples refer to each other, so both would live until the next full garbage collection.
        """
        self.stored = None
        for sample in self.samples:
            sample.output = None


@dataclass(frozen=True, slots=True)
class FilteredGroup:
    """A group that was consumed without being trained, as recorded in ``run.jsonl``."""

    uid: str
    order: int
    birth: int | None
    """policy version under which its first sample started"""
    value: float
    """value of ``algorithm.filter_groups.metric``, the same in all its samples"""
    lengths: list[int]
    """response tokens of each sample"""
    scores_differ: bool = False
    """whether its samples have different scores, although they share ``value``"""


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot given to a worker for one sample."""

    sample_id: str
    group_uid: str
    order: int
    row: dict[str, Any]
    segments: tuple[Segment, ...]
    """segments of its first turn, from which the sample continues; empty if it has none, or is ``resident``"""
    resident: bool = False
    """whether the worker still holds the sample's conversation, and so its segments"""
    slots: int = 0
    """number of slots that the worker has from here on; 0: unchanged"""


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """A group in the trainer's batch."""

    uid: str
    order: int
    row: dict[str, Any]
    outputs: Sequence[SampleOutput]
    """outputs of its samples, in order; before the driver has fetched them, the store's reference to all of them"""
    birth: int | None = None
    """policy version under which its first sample started"""

    @property
    def rows(self) -> list[SampleOutput]:
        """Rows that the group's samples train, sample after sample."""
        return [row for output in self.outputs for row in output.rows]


# -- messages between the manager actor, its workers and the driver -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Added:
    """``segments`` that the engine calls of a sample have made since its worker last reported them."""

    sample_id: str
    segments: list[Segment]


@dataclass(frozen=True, slots=True)
class Parked:
    """A sample gave its slot back and lives on in its worker (``SampleState.PARKED``)."""

    sample_id: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A sample needs a slot again, in the same worker. The slot that it had, if any, is free."""

    sample_id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample has ended with ``output``, which has all its tokens, reported before or not."""

    sample_id: str
    output: SampleOutput


@dataclass(frozen=True, slots=True)
class Failed:
    """A sample failed: its agent loop raised ``error`` (one line), or its reward failed ``times`` in a row."""

    sample_id: str
    error: str
    times: int = 1


Event = Added | Parked | Interrupted | Finished | Failed


@dataclass(slots=True)
class Report:
    """Events of a worker's samples in one message. The worker adds events until it sends the message."""

    worker: str
    events: list[Event] = field(default_factory=list)
    """in the order in which they happened"""
    rescored: int = 0
    """number of rewards that failed and will be computed again"""
    errors: list[ErrorText] = field(default_factory=list)
    """errors of samples and tools, only the first of each kind (``ErrorText.kind``) in this worker"""
    fatal: str | None = None
    """an error that ends the run, in one line"""


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """Progress of an open round."""

    ready_groups: int
    running: int
    """samples that hold a slot of a worker"""
    oldest: int
    """versions since the oldest group in flight started; 0 if none has started"""


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A version's batch, as ``ManagerActor.batch`` returns it."""

    decided_at: float
    """unix seconds at which the manager found the batch complete and took it"""
    groups: list[TakenGroup]
    """groups of the batch, oldest first; the driver fetches their outputs from the store"""
    carried_groups: int
    """groups that were ACTIVE or READY when the batch's version began"""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The manager's part of a trained step's record.

    The driver must write it to the run's log before the next checkpoint, which lacks ``admitted`` and ``filtered``.
    """

    admitted: list[str]
    """uids of the groups admitted since the step before, in dispatch order"""
    filtered: list[FilteredGroup]
    """groups filtered since the step before"""
    metrics: dict[str, float]
    """``PromptsManager.metrics`` after the update; its ``gauges`` were read when the batch was taken"""
    errors: tuple[ErrorText, ...] = ()
    """errors that workers have reported since the step before, each the first of its kind in this process of the run"""


class RolloutFailedError(RuntimeError):
    """A part of the rollout failed; the message names it."""
