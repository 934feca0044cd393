"""How many samples ran on each replica at each moment."""

from recipe.partial_rollout.records import running_curve as records
from recipe.partial_rollout.records.round import Round
from recipe.partial_rollout.records.running_curve import RunningCurve


def running_curve(round_: Round, replicas: int) -> RunningCurve:
    """One row a replica."""
    return records.running_curve(round_.phase, [int(call.replica) for call in round_.phase.calls], replicas)
