"""How many samples ran on each replica at each moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipe.partial_rollout.records import running_curve as records
from recipe.partial_rollout.records.running_curve import RunningCurve

if TYPE_CHECKING:
    from recipe.partial_rollout.records.rollout_phase import RolloutPhase


def running_curve(phase: RolloutPhase, replicas: int) -> RunningCurve:
    """One row a replica."""
    return records.running_curve(phase, phase.replicas, replicas)
