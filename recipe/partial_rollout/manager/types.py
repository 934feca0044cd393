"""Records of the recipe: prompt, group, sample, segment; and the messages that carry them.

Each lifecycle is one enum field: only ``Samples`` writes that of a sample, only ``Groups`` that of a group.
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
    """Gave its slot back and lives on in its worker, which awaits its reward or a tool: it ends there, or comes back."""
    INTERRUPTED = "interrupted"
    """Gave its slot back before it ended, and waits for another one; its tokens are cached."""
    FINISHED = "finished"
    FAILED = "failed"
    """Its agent loop failed and it waits for its retry; if it is not retried, it is masked or ends the run."""


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
    """The tokens that one engine call added to a sample; if it was held, those that one version made."""

    token_ids: np.ndarray
    """int32 [segment_length]"""
    log_probs: np.ndarray
    """float32 [segment_length]; under the version that sampled the tokens, at the sampling temperature"""
    version: int
    """policy version that made the tokens"""
    stop_reason: str | None = None
    """the engine's stop reason if the turn is complete; None if the engine call was interrupted, or held after it"""
    turn: int = 0
    """number of its turn in the sample; turns may run concurrently"""
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
                f"the engine gave {self.log_probs[first]} as the log-prob of token {self.token_ids[first]}"
            )

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """A finished sample, unpadded. ``R`` is its response length: generated and tool tokens.

    An agent loop that returned several outputs has trained several rows: this is its last one, which carries the score, and
    ``earlier`` has those before it. The state machine knows samples only.
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
    """engine calls that generated it; a call that was held counts once for each version"""
    reward_score: float | None
    reward_extra_info: dict[str, Any]
    num_turns: int
    metrics: dict[str, float]
    """verl's agent-loop metrics (seconds), and the ``untrained_tokens`` that were decoded for it"""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    masked: bool = False
    """whether this replaces a sample that has used up its retries: mask all 0, no reward, ``prompt_ids`` empty"""
    images: tuple[int | bytes, ...] = ()
    """that its tokens show, in order: one of the row's by its place there, one that the loop made as a PNG file"""
    earlier: tuple[SampleOutput, ...] = ()
    """rows of the sample before this one, in the order in which its loop returned them"""

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.response_mask), len(self.log_probs), len(self.versions)}
        if len(lengths) != 1:
            raise RuntimeError(
                f"sample with {len(self.response_ids)} tokens, {len(self.response_mask)} mask entries, "
                f"{len(self.log_probs)} log-probs and {len(self.versions)} versions: they must be equal"
            )

    @property
    def rows(self) -> tuple[SampleOutput, ...]:
        """Rows of the sample that are trained, in the order in which its loop returned them.

        They are those of ``earlier``, then this output with an empty ``earlier``.
        """
        return (*self.earlier, replace(self, earlier=())) if self.earlier else (self,)

    @property
    def response_length(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.response_ids) for row in (*self.earlier, self))

    @property
    def generated(self) -> np.ndarray:
        """int32 [G]: policy versions of the generated tokens alone, row after row."""
        return np.concatenate([row.versions[row.response_mask.astype(bool)] for row in (*self.earlier, self)])

    def staleness(self, version: int) -> int:
        """Versions from its oldest generated token to the update that starts from ``version``; 0 without tokens."""
        generated = self.generated
        # Rows come in any order: a loop may return a branch that began last before the others.
        return int(version - generated.min()) if len(generated) else 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row of one epoch."""

    uid: str
    """``epoch/position``, where position counts the rows in the epoch's order"""
    row: dict[str, Any]
    """non-tensor fields of verl's dataset row"""


def position_of(uid: str) -> tuple[int, int]:
    """Epoch, and position in it; sorting by both gives the order in which prompts come from the source."""
    epoch, position = uid.split("/")
    return int(epoch), int(position)


@dataclass(slots=True)
class Sample:
    """One response of a group."""

    id: str
    """``GROUP_UID#INDEX``"""
    group: PromptGroup
    state: SampleState = SampleState.WAITING
    """written by ``Samples`` alone"""
    worker: str | None = None
    """the worker that runs it or holds its live conversation"""
    segments: list[Segment] = field(default_factory=list)
    """what its engine calls have made, oldest first"""
    failures: int = 0
    """failures of its agent loop or reward"""
    error: str | None = None
    """the last of these errors, in one line"""
    output: SampleOutput | None = None
    """once it has finished, until its group is READY"""
    since: float = 0.0
    """clock reading (s) of the last state change"""

    @property
    def cached_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    @property
    def lasting_segments(self) -> list[Segment]:
        """Segments that outlive its conversation: all of a single-turn sample, none of a multi-turn one.

        A second turn's prompt has tool answers, which only the agent loop knows.
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
    """what the store has returned for the outputs, once it is READY"""

    @property
    def length(self) -> int:
        """Response tokens of all samples so far."""
        return self.finished_length + sum(sample.cached_tokens for sample in self.samples)

    @property
    def uid(self) -> str:
        return self.prompt.uid

    @property
    def outputs(self) -> list[SampleOutput]:
        """Outputs of the samples that have finished; none once they are stored."""
        return [sample.output for sample in self.samples if sample.output is not None]

    @property
    def mean_finished_length(self) -> float:
        """Mean length of the finished samples, tokens; 1e9 if none has finished, which sorts last (published key)."""
        finished = len(self.samples) - self.unfinished
        return self.finished_length / finished if finished else 1e9

    def drop_outputs(self) -> None:
        """Drop the outputs now: group and samples refer to each other and would keep them until garbage collection."""
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
    """of its first turn, from which it goes on; empty for the worker that still holds its conversation"""
    resident: bool = False
    """whether the worker that gets it still holds its conversation"""
    slots: int = 0
    """slots that the worker has from here on; 0: as many as before"""


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """A group in the trainer's batch."""

    uid: str
    order: int
    row: dict[str, Any]
    outputs: Sequence[SampleOutput]
    """of its samples, in order; as long as they are not fetched, what stands for them all in the output store"""
    birth: int | None = None
    """policy version under which its first sample started"""

    @property
    def rows(self) -> list[SampleOutput]:
        """Rows of the group's samples, in order."""
        return [row for output in self.outputs for row in output.rows]


# -- messages between the manager actor, its workers and the driver -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Added:
    """Engine calls of a sample made ``segments`` since its worker last reported on it."""

    sample_id: str
    segments: list[Segment]


@dataclass(frozen=True, slots=True)
class Parked:
    """A sample gave its slot back and lives on in its worker."""

    sample_id: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A sample needs a slot again, in the same worker."""

    sample_id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample has ended with ``output``, which stands for all that was not reported yet."""

    sample_id: str
    output: SampleOutput


@dataclass(frozen=True, slots=True)
class Failed:
    """The agent loop of a sample, or its reward ``times`` in a row, raised ``error`` (one line)."""

    sample_id: str
    error: str
    times: int = 1


Event = Added | Parked | Interrupted | Finished | Failed


@dataclass(slots=True)
class Report:
    """Events of a worker's samples, sent as one message; the worker adds to it until it is sent."""

    worker: str
    events: list[Event] = field(default_factory=list)
    """in the order in which they happened"""
    rescored: int = 0
    """rewards that failed and are asked for again"""
    errors: list[ErrorText] = field(default_factory=list)
    """the first of each kind in this worker, of samples and tools"""
    fatal: str | None = None
    """an error that ends the run, in one line"""


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """How far an open round is."""

    ready_groups: int
    running: int
    """samples that hold a slot of a worker"""
    oldest: int
    """versions since the oldest group in flight started; 0 if none has started"""


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """The batch that ``wait_batch`` took when it found it complete."""

    decided_at: float
    """unix seconds"""
    groups: list[TakenGroup]
    """the caller fetches their outputs from the store"""
    carried_groups: int
    """groups that had started when its version began, and were not trained (ACTIVE or READY)"""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The manager's part of the record of a trained step; the run's log must have it before the next checkpoint."""

    admitted: list[str]
    """uids of the groups admitted since the step before, in order"""
    filtered: list[FilteredGroup]
    """since the step before"""
    metrics: dict[str, float]
    """``PromptsManager.metrics`` of the batch; its ``gauges`` are those before the next version began"""
    errors: tuple[ErrorText, ...] = ()
    """those that workers have reported since the step before, the first of each kind"""


class RolloutFailedError(RuntimeError):
    """A part of the rollout failed; the message names it."""
