"""Patch: verl's rollout correction knows a third level, ``rollout_correction.rollout_is=geometric``.

verl weighs a token by its own ratio or by the product of its sequence's ratios. The product's noise grows with length: .03
nats a token make 3.8 nats at 16,000 tokens, and a cap of 2 leaves an effective sample of 6%. The geometric mean is the
product's root by the number of generated tokens, one weight for the sequence whose size does not depend on its length.
Capping, masking, batch normalisation and ``rollout_corr/`` metrics are verl's of the sequence level.
"""

from __future__ import annotations

import functools
from typing import Any

import wrapt

from verl_ext.guard import VERL, require

GEOMETRIC = "geometric"
_TARGET = "verl.trainer.ppo.rollout_corr_helper"


def _patch(module: Any) -> None:
    original = module.compute_rollout_correction_weights
    if getattr(original, "_knows_geometric", False):
        return

    @functools.wraps(original)
    def compute_rollout_correction_weights(
        log_ratio: Any, response_mask: Any, rollout_is: str = "token", *args: Any, **kwargs: Any
    ) -> Any:
        if rollout_is == GEOMETRIC:
            # verl sums over the sequence: shares of the sum by the number of tokens add up to the mean.
            log_ratio = log_ratio / response_mask.sum(-1, keepdim=True).clamp(min=1)
            rollout_is = "sequence"
        return original(log_ratio, response_mask, rollout_is, *args, **kwargs)

    compute_rollout_correction_weights._knows_geometric = True  # type: ignore[attr-defined]
    module.compute_rollout_correction_weights = compute_rollout_correction_weights


def install() -> None:
    require("verl", VERL, "geometric_weights")
    wrapt.register_post_import_hook(_patch, _TARGET)
