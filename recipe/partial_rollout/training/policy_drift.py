"""An early warning of training collapse: the policy moves away from the one that made its samples."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

KL = "rollout_corr/k3_kl"
"""verl's metric: divergence of the policy before the update from the behaviour policy, by the k3 estimator (nats a token).
Unlike the mean log-ratio, ``rollout_corr/kl``, it is never negative, and has less noise"""
_FACTOR, _FLOOR, _FIRST = 10.0, 0.002, 5
"""the warning needs this many times the median so far, at least this many nats, and this many earlier steps"""


class PolicyDrift:
    """Compares each step's ``rollout_corr/k3_kl`` with those before it (docs/learning.md has the limits' origin)."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._alarmed = False

    def observe(self, data: Mapping[str, Any], step: int) -> str | None:
        """A warning if drift begins in ``step``; None if there is no drift, or if it began earlier."""
        if KL not in data:
            return None
        kl, usual = float(data[KL]), median(self._seen) if len(self._seen) >= _FIRST else None
        self._seen.append(kl)
        before, self._alarmed = self._alarmed, usual is not None and kl > max(_FLOOR, _FACTOR * usual)
        if not self._alarmed or before:
            return None
        return (
            f"warning: at step {step} the policy has drifted far from the one that made its samples ({KL} {kl:.4f}, "
            f"{usual:.5f} by the median so far): its reward is likely to fall. Lower actor_rollout_ref.actor.optim.lr "
            f"or partial_rollout.overlap, and resume from an earlier checkpoint"
        )
