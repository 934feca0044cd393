"""Events of ``trace.jsonl`` besides ``Round``; times are unix seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Probe:
    """The engines' speed when kept full, measured in the run itself through the same path as its rounds."""

    EVENT: ClassVar[str] = "probe"
    tokens_per_s: float
    concurrency: int
    """running samples"""


@dataclass(frozen=True, slots=True)
class Thinned:
    """The header of a thinned trace: its rounds keep the engine calls of one step in ``every`` only, and totals of all."""

    EVENT: ClassVar[str] = "thinned"
    every: int


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
