"""Early warnings of collapse: a loss that is no number; a policy that moves away from the one that made its samples."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from numbers import Real
from statistics import median
from typing import Any

KL = "rollout_corr/k3_kl"
"""verl's metric: divergence of the policy before the update from the behaviour policy, by the k3 estimator (nats a token).
Unlike the mean log-ratio, ``rollout_corr/kl``, it is never negative, and has less noise"""
_FACTOR, _FLOOR, _FIRST = 10.0, 0.002, 5
"""the warning needs this many times the median so far, at least this many nats, and this many earlier steps"""
_WATCHED = ("actor/", "critic/", "rollout_corr/")
"""verl's names for losses, gradients, rewards, advantages and divergences"""


def not_finite(data: Mapping[str, Any], step: int) -> str | None:
    """A warning that names the figures of ``step`` that are nan or infinite; None if all are finite."""
    watched = ((key, value) for key, value in data.items() if key.startswith(_WATCHED) and isinstance(value, Real))
    broken = [f"{key} {value}" for key, value in watched if not isfinite(value)]
    if not broken:
        return None
    return (
        f"warning: at step {step} not finite: {', '.join(broken)}. FSDP skips an update without a finite gradient; others "
        f"spoil the weights. Look at the rewards and log-probs of its batch; if it recurs, resume an earlier checkpoint"
    )


class PolicyDrift:
    """Compares each step's ``rollout_corr/k3_kl`` with those before it (docs/learning.md has the limits' origin)."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._alarmed = False

    def observe(self, data: Mapping[str, Any], step: int) -> str | None:
        """Warnings if drift begins in ``step``, or a figure of it is not finite; None if all is well or drift goes on."""
        return "\n".join(filter(None, (not_finite(data, step), self._drift(data, step)))) or None

    def _drift(self, data: Mapping[str, Any], step: int) -> str | None:
        kl = float(data.get(KL, "nan"))
        if not isfinite(kl):
            return None
        usual = median(self._seen) if len(self._seen) >= _FIRST else None
        self._seen.append(kl)
        before, self._alarmed = self._alarmed, usual is not None and kl > max(_FLOOR, _FACTOR * usual)
        if not self._alarmed or before:
            return None
        return (
            f"warning: at step {step} the policy has drifted far from the one that made its samples ({KL} {kl:.4f}, "
            f"{usual:.5f} by the median so far): its reward is likely to fall. Lower actor_rollout_ref.actor.optim.lr "
            f"or partial_rollout.overlap, and resume from an earlier checkpoint"
        )
