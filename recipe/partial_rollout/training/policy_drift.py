"""An early warning of training collapse: the policy moves away from the one that made its samples."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

KL = "rollout_corr/kl"
"""verl's metric: mean log-ratio of the behaviour policy to the one before the update (nats a token)"""
_FACTOR, _FLOOR, _FIRST = 10.0, 0.005, 5
"""the warning needs this many times the median so far, at least this many nats, and this many earlier steps"""


class PolicyDrift:
    """Compares each step's ``rollout_corr/kl`` with those before it.

    The limits were tuned on 54 runs of the embedded task (docs/scheduling.md): the warning fired in all 15 whose reward
    collapsed, and in one of the other 39.
    """

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._alarmed = False

    def observe(self, data: Mapping[str, Any], step: int) -> str | None:
        """A warning if drift begins in ``step``; None if there is no drift, or if it began earlier."""
        if KL not in data:
            return None
        kl, usual = float(data[KL]), median(self._seen) if len(self._seen) >= _FIRST else None
        self._seen.append(abs(kl))
        before, self._alarmed = self._alarmed, usual is not None and kl > max(_FLOOR, _FACTOR * usual)
        if not self._alarmed or before:
            return None
        return (
            f"warning: at step {step} the policy has drifted far from the one that made its samples ({KL} {kl:.4f}, "
            f"{usual:.5f} by the median so far): its reward is likely to fall. Lower actor_rollout_ref.actor.optim.lr "
            f"or partial_rollout.overlap, and resume from an earlier checkpoint"
        )
