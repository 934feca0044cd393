"""The engines of a forecast."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.partial_rollout.planner.engine_curve import EngineCurve


@dataclass(frozen=True, slots=True)
class Cluster:
    """The replicas that decode."""

    curve: EngineCurve
    """speed of each replica"""
    replicas: int
    slots_per_replica: int
    keeps_kv: bool = False
    """whether interrupted samples keep their keys and values (``partial_rollout.resume_kv=keep``)"""

    def full_tokens_per_s(self, samples: int, context: float) -> float:
        """Tokens/s of all replicas while ``samples`` with ``context`` tokens each run, or fewer for want of slots."""
        running = min(samples / self.replicas, self.slots_per_replica)
        return self.replicas * running / self.curve.decode_s(running, running * context)
