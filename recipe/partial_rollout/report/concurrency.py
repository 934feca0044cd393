"""How many samples ran on each replica at each moment."""

from recipe.partial_rollout import definitions
from recipe.partial_rollout.definitions import RunningCurve

from .records import Round


def running_curve(round_: Round, replicas: int) -> RunningCurve:
    """One row a replica."""
    return definitions.running_curve(round_, [call.replica for call in round_.calls], replicas)
