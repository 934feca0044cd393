"""Messages between the manager actor, its workers and the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipe.partial_rollout.manager.types import FilteredGroup, FinishedOutput, Progress, SampleOutput, TakenGroup
from recipe.partial_rollout.waits import ToldError


@dataclass(slots=True)
class Report:
    """What happened to a worker's samples, in one message; the worker adds to it until it is sent."""

    worker: str
    progress: list[Progress] = field(default_factory=list)
    """booked first, because it includes the last progress of samples that the other fields name"""
    interrupted: list[str] = field(default_factory=list)
    """ids of samples that gave their slot back"""
    away: list[str] = field(default_factory=list)
    """ids of samples that gave their slot back and live on: their reward or a tool takes long"""
    back: list[str] = field(default_factory=list)
    """ids of samples that were away and need a slot again"""
    finished: list[tuple[str, SampleOutput]] = field(default_factory=list)
    failed: list[tuple[str, str, int]] = field(default_factory=list)
    """sample id, the error that its agent loop or reward raised, in one line, and how many times in a row"""
    rescored: int = 0
    """rewards that failed and are asked for again"""
    errors: list[ToldError] = field(default_factory=list)
    """the first of each kind in this worker, of samples and tools"""

    def __bool__(self) -> bool:
        """Whether anything happened."""
        happened = self.progress, self.interrupted, self.away, self.back, self.finished, self.failed
        return any((*happened, self.rescored, self.errors))


@dataclass(frozen=True, slots=True)
class VersionStart:
    """What a policy version begins with."""

    admitted: int
    carried_groups: int
    exhausted: bool = False
    """the version did not begin, because the data ended with fewer prompts left than a batch needs"""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far an open round is."""

    ready_groups: int
    running: int
    """samples that hold a slot of a worker"""
    oldest: int
    """versions since the first token of the oldest group in flight; 0 if none has begun"""


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """What ``wait_batch`` took when it decided that the batch is complete."""

    decided_at: float
    """unix seconds"""
    groups: list[TakenGroup[FinishedOutput]] = field(default_factory=list)
    """empty if the rollout was suspended; the caller fetches their outputs from the store"""
    admitted: tuple[str, ...] = ()
    """uids of the groups admitted since the batch before, in order; a checkpoint keeps them until the batch is trained"""
    wanted: int = 0
    """prompts to offer with the next version (``PromptsManager.wanted``)"""


@dataclass(frozen=True, slots=True)
class PromptsWanted:
    """A request for prompts: the rollout continues and may filter more groups than the reserve can replace."""

    count: int
    """prompts to offer before ``wait_batch`` is called again"""


@dataclass(frozen=True, slots=True)
class StepAccount:
    """What ``finish_step`` tells about a step that is trained; the ledger must have it before the next checkpoint."""

    filtered: tuple[FilteredGroup, ...]
    """filtered since the step before, of those whose admission a batch has told"""
    wanted: int
    """prompts to offer with the next version (``PromptsManager.wanted``)"""
    metrics: dict[str, float]
    """``PromptsManager.metrics`` of the last flush if the round was stopped, else those before the batch was forgotten"""
    errors: tuple[ToldError, ...] = ()
    """those that workers have told since the step before, the first of each kind"""


class RolloutFailedError(RuntimeError):
    """A part of the rollout failed; the message names it."""
