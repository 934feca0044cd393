"""What is booked of a round whose batch is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipe.partial_rollout.manager.messages import RoundStart
from recipe.partial_rollout.manager.types import FilteredGroup, TakenGroup
from recipe.partial_rollout.records.rollout_phase import RolloutPhase


@dataclass(frozen=True, slots=True)
class TrainedRound:
    """A round of either placement, as ``RoundBook`` needs it."""

    step: int
    start: RoundStart
    admitted: tuple[str, ...]
    """uids of the groups admitted since the last batch was taken, in order"""
    phase: RolloutPhase
    """in separate placement from the batch before to this one; its calls are those that ended since the last booking"""
    groups: list[TakenGroup]
    """the batch"""
    filtered: tuple[FilteredGroup, ...]
    """groups that dynamic sampling left out"""
    gauges: dict[str, float]
    """``PromptsManager.metrics``"""
    waits: dict[str, float] = field(default_factory=dict)
    """seconds by name; colocated with ``interrupt_s`` and ``resume_s``"""

    @property
    def version(self) -> int:
        """Policy version before the update on this batch."""
        return self.step - 1
