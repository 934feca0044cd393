"""How many samples ran on each replica at each moment."""

from recipe.partial_rollout.records import definitions
from recipe.partial_rollout.records.definitions import RunningCurve
from recipe.partial_rollout.records.parts import Round


def running_curve(round_: Round, replicas: int) -> RunningCurve:
    """One row a replica."""
    return definitions.running_curve(round_, [call.replica for call in round_.calls], replicas)
