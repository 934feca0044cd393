"""Events of ``trace.jsonl`` besides ``Round``; times are unix seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Probe:
    """The engines' speed when kept full, measured in the run itself through the same path as its rounds."""

    EVENT: ClassVar[str] = "probe"
    tokens_per_s: float
    concurrency: int
    """running samples"""


@dataclass(frozen=True, slots=True)
class Begin:
    """The rollout of ``step`` begins."""

    EVENT: ClassVar[str] = "begin"
    step: int
    start: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase that is not a rollout."""

    EVENT: ClassVar[str] = "phase"
    name: str
    """``train``, ``validate``, or ``sync``: new weights on their way to the replicas"""
    step: int
    start: float
    end: float
