"""How many samples ran on each replica at each moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipe.partial_rollout.records import running_curve as records
from recipe.partial_rollout.records.call_columns import CallColumns
from recipe.partial_rollout.records.running_curve import RunningCurve

if TYPE_CHECKING:
    from recipe.partial_rollout.records.rollout_phase import RolloutPhase


def running_curve(phase: RolloutPhase, replicas: int) -> RunningCurve:
    """One row a replica."""
    calls = phase.calls
    rows = calls.column("replica") if isinstance(calls, CallColumns) else [int(call.replica) for call in calls]
    return records.running_curve(phase, rows, replicas)
