"""Events of ``trace.jsonl`` besides ``Round``; times are unix seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from recipe.partial_rollout.records.fields import Fields
from recipe.partial_rollout.records.resumed import Resumed
from recipe.partial_rollout.records.round import Round


@dataclass(frozen=True, slots=True)
class Probe:
    """The engines' speed when kept full, measured in the run itself through the same path."""

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
    """Something else than a rollout took place."""

    EVENT: ClassVar[str] = "phase"
    name: str
    """``train`` or ``validate``"""
    step: int
    start: float
    end: float


TraceEvent = Probe | Begin | Round | Phase | Resumed


def to_json(event: Begin | Round | Phase | Resumed) -> dict[str, Any]:
    """The event's line."""
    return {"event": event.EVENT, **(event.to_json() if isinstance(event, Round) else asdict(event))}


def from_json(line: Fields, replicas: int | None) -> TraceEvent | None:
    """The inverse of ``to_json``; None for an event of another version of the recipe.

    Args:
        replicas: of the run, for what its calls may name; None: any.

    Raises:
        RunRecordError: a field is missing, mistyped or impossible; names the line.
    """
    match line.text("event"):
        case Probe.EVENT:
            return Probe(line.number("tokens_per_s"), line.integer("concurrency"))
        case Begin.EVENT:
            return Begin(line.integer("step"), line.number("start"))
        case Round.EVENT:
            return Round.from_json(line, replicas)
        case Phase.EVENT:
            return Phase(line.text("name"), line.integer("step"), *line.span())
        case Resumed.EVENT:
            return Resumed(line.integer("step"))
    return None
