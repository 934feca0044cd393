"""One round of a run: a line of ``trace.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from recipe.partial_rollout.records.engine_call import CallColumns, CallTotals, EngineCall
from recipe.partial_rollout.records.fields import Fields
from recipe.partial_rollout.records.rollout_phase import RolloutPhase
from recipe.partial_rollout.records.trained_group import GroupColumns, TrainedGroup


@dataclass(frozen=True, slots=True)
class Round:
    """A rollout phase and the groups that it trains."""

    EVENT: ClassVar[str] = "round"
    step: int
    version: int
    """policy version that the engines held"""
    phase: RolloutPhase
    trained: Sequence[TrainedGroup] = field(repr=False)
    interrupt_s: float | None = None
    """seconds from the decision to interrupt until every engine was quiet; None if the arm does not interrupt"""
    resume_s: float | None = None
    """seconds from the opening of the round to its first engine call; None if the arm does not interrupt"""
    carried_groups: int = 0
    """unfinished groups that it started with"""
    lost_samples: int = 0
    """samples unaccounted for so far, not only in this round"""
    at: int = field(default=0, repr=False, compare=False)
    """byte of the trace at which its line begins, if it was read"""

    def to_json(self) -> dict[str, Any]:
        """Its line, without the event's name. One without its calls has no ``calls``: older readers must refuse it."""
        calls = {} if self.phase.thinned else {"calls": [call.to_json() for call in self.phase.calls]}
        totals = self.phase.totals
        return {
            **calls,
            **({} if totals is None else {"totals": totals.to_json()}),
            "step": self.step,
            "version": self.version,
            "start": self.phase.start,
            "end": self.phase.end,
            "interrupt_s": self.interrupt_s,
            "resume_s": self.resume_s,
            "trained": [group.to_trace() for group in self.trained],
            "carried_groups": self.carried_groups,
            "lost_samples": self.lost_samples,
        }

    @classmethod
    def from_json(cls, line: Fields, replicas: int | None) -> Self:
        """The inverse of ``to_json``; ``replicas`` is the number of the run's replicas (None: any).

        Raises:
            RunRecordError: a field is missing, mistyped or impossible; names the line.
        """
        start, end = line.span()
        groups = line.objects("trained", "one object a group")
        totals, rows = None, []
        if "totals" in line.values:
            totals = CallTotals.from_json(line.object("totals"), replicas)
        if totals is None or "calls" in line.values:
            rows = line.items("calls")
        calls = CallColumns(EngineCall.from_json(values, line.place, replicas) for values in rows)
        return cls(
            step=line.integer("step"),
            version=line.integer("version"),
            phase=RolloutPhase(start, end, calls, totals),
            trained=GroupColumns(map(TrainedGroup.from_trace, groups)),
            interrupt_s=line.optional_number("interrupt_s"),
            resume_s=line.optional_number("resume_s"),
            carried_groups=line.integer("carried_groups"),
            lost_samples=line.integer("lost_samples"),
            at=line.at,
        )
