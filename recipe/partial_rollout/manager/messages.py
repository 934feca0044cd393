"""Messages between the manager actor, its workers and the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.partial_rollout.manager.types import FilteredGroup, Progress, SampleOutput


@dataclass(frozen=True, slots=True)
class Report:
    """What happened to a worker's samples, in one message."""

    worker: str
    progress: tuple[Progress, ...] = ()
    """booked first, because it includes the last progress of samples that the other fields name"""
    interrupted: tuple[str, ...] = ()
    """ids of samples that gave their slot back"""
    scoring: tuple[str, ...] = ()
    """ids of samples that gave their slot back and await their reward"""
    finished: tuple[tuple[str, SampleOutput], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    """sample id and the error that its agent loop raised, in one line"""


@dataclass(frozen=True, slots=True)
class RoundStart:
    """What a new round starts with."""

    admitted: int
    carried_groups: int
    exhausted: bool = False
    """no round was opened, because the data ended with fewer prompts left than a batch needs"""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far an open round is."""

    ready_groups: int
    running: int
    """samples that hold a slot of a worker"""
    oldest: int
    """versions since the first token of the oldest group in flight; 0 if none has begun"""


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """The manager's decision to interrupt the round."""

    decided_at: float
    """unix seconds"""
    admitted: tuple[str, ...] = ()
    """uids of the groups admitted since the last batch was taken, in order"""
    wanted: int = 0
    """``PromptsManager.wanted``"""


@dataclass(frozen=True, slots=True)
class PromptsWanted:
    """A request for prompts: the round continues and may filter more groups than the reserve can replace."""

    count: int
    """prompts to offer before ``wait_round`` or ``next_batch`` is called again"""


@dataclass(frozen=True, slots=True)
class StepAccount:
    """What became of the prompts in a step of separate placement: since the account of the step before."""

    admitted: tuple[str, ...]
    """uids of the groups admitted, in order"""
    filtered: tuple[FilteredGroup, ...]
    wanted: int
    """prompts to offer with the next version (``PromptsManager.wanted``)"""
    metrics: dict[str, float]
    """``PromptsManager.metrics`` once the step is trained"""


@dataclass(frozen=True, slots=True)
class Flushed:
    """Every worker has reported everything about a round."""

    at: float
    """unix seconds"""
    metrics: dict[str, float]
    """``PromptsManager.metrics`` at that moment, before the next round is prepared"""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored from a snapshot."""

    version: int
    groups: int
    """groups in flight: unfinished or ready"""
    ready_groups: int
    unfinished_samples: int
    cached_tokens: int
    """tokens of unfinished and finished samples; they are not generated again"""


class RolloutFailedError(RuntimeError):
    """A part of the rollout failed; the message names it."""
