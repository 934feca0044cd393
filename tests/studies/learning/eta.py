"""AReaL's ablation (arXiv 2505.24298): what its bound on staleness costs and buys, with and without the decoupled loss.

AReaL has one knob, eta: it admits as many samples as can be trained within eta versions, so eta is both window and bound.
Here these are ``overlap`` and ``max_staleness``. AReaL's samples can pass its bound; these cannot. The rollout seconds of
these arms are the trainer's waits: compare whole steps.
"""

from __future__ import annotations

from dataclasses import replace

from tests.studies.arm import Arm

_ETAS = (0, 1, 2, 4, 8)


def _decoupled(eta: int) -> Arm:
    overrides = (
        "partial_rollout.placement=separate",
        "partial_rollout.trainer_cores=1",
        f"partial_rollout.overlap={eta}",
        f"partial_rollout.max_staleness={eta}",
        "partial_rollout.correction=decoupled",
    )
    return Arm(f"PR_eta_{eta}", f"PR, separate, eta {eta}", overrides)


def _uncorrected(arm: Arm) -> Arm:
    overrides = (*arm.overrides, "partial_rollout.correction=none")
    return replace(arm, name=f"{arm.name}_uncorrected", caption=f"{arm.caption}, correction=none", overrides=overrides)


def _masked(arm: Arm) -> Arm:
    overrides = (*arm.overrides, "partial_rollout.trust_region=mask")
    return replace(arm, name=f"{arm.name}_mask", caption=f"{arm.caption}, trust region mask", overrides=overrides)


_DECOUPLED = tuple(_decoupled(eta) for eta in _ETAS)
ETA_ARMS = (*_DECOUPLED, *map(_uncorrected, _DECOUPLED), *map(_masked, _DECOUPLED))
"""AReaL's loss, no correction, AReaL's loss with the recipe's mask; at eta 0 all are the same, with noPR's samples"""
