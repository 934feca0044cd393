"""What the manager actor, its workers and the trainer tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.partial_rollout.manager.types import Progress, SampleOutput


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker has to say of its samples, in one message."""

    worker: str
    progress: tuple[Progress, ...] = ()
    """booked first: it also tells what samples did that the other fields name"""
    interrupted: tuple[str, ...] = ()
    """samples that gave their slot back"""
    finished: tuple[tuple[str, SampleOutput], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    """sample and the error that its agent loop raised, in one line"""


@dataclass(frozen=True, slots=True)
class RoundStart:
    """What a new round starts with."""

    admitted: int
    carried_groups: int
    exhausted: bool = False
    """no round was opened: the data has ended with fewer prompts left than a batch needs"""


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """Decision to interrupt."""

    decided_at: float
    """unix seconds"""
    admitted: tuple[str, ...] = ()
    """uids of the groups admitted since the last batch was taken, in order"""
    wanted: int = 0
    """``PromptsManager.wanted``"""


@dataclass(frozen=True, slots=True)
class PromptsWanted:
    """The round goes on, and filters more groups than the reserve may replace."""

    count: int
    """to offer before it is waited for again"""


@dataclass(frozen=True, slots=True)
class Flushed:
    """Every worker has reported everything of a round."""

    at: float
    """unix seconds"""
    metrics: dict[str, float]
    """``PromptsManager.metrics`` of that moment, before the next round is prepared"""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a snapshot brought back."""

    version: int
    groups: int
    """in flight: unfinished or ready"""
    ready_groups: int
    unfinished_samples: int
    cached_tokens: int
    """of unfinished and finished samples; they are not generated again"""


class RolloutFailedError(RuntimeError):
    """A part of the rollout failed; the message names it."""
