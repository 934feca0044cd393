"""Patch: verl's weight metrics survive a batch in which every behaviour weight is masked.

With ``rollout_is_threshold=lower_upper`` all weights of a batch may be 0, most easily at the sequence level. The batch has
no gradient then, which is right, but the effective sample size, ``1 / mean(weight^2)``, ends the training with a
``ZeroDivisionError``. It is 0.
"""

from __future__ import annotations

import functools
from typing import Any

import wrapt

from verl_ext.guard import VERL, require

_TARGET = "verl.trainer.ppo.rollout_corr_helper"
_TINY = 1e-12
"""stands in for a weight of 0 in the other metrics"""


def _patch(module: Any) -> None:
    original = module.compute_is_metrics
    if getattr(original, "_survives_masks", False):
        return

    @functools.wraps(original)
    def compute_is_metrics(rollout_is_weights: Any, *args: Any, **kwargs: Any) -> Any:
        if rollout_is_weights.any():
            return original(rollout_is_weights, *args, **kwargs)
        metrics = original(rollout_is_weights + _TINY, *args, **kwargs)
        metrics["rollout_is_eff_sample_size"] = 0.0
        return metrics

    compute_is_metrics._survives_masks = True  # type: ignore[attr-defined]
    module.compute_is_metrics = compute_is_metrics


def install() -> None:
    require("verl", VERL, "masked_weights")
    wrapt.register_post_import_hook(_patch, _TARGET)
