"""Patches of verl's rollout correction: a third level of weights, and batches in which every weight is masked.

They may go when verl knows ``rollout_is=geometric``, and when its effective sample size takes a batch of zeros.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from verl_ext.guard import around, replaced

GEOMETRIC = "geometric"
_TINY = 1e-12
"""stands in for a weight of 0 in the metrics of a batch that has no other"""


def know_geometric(module: Any) -> None:
    """Add the level ``rollout_correction.rollout_is=geometric``.

    verl weighs a token by its own ratio or by the product of its sequence's ratios. The product's noise grows with length:
    .03 nats a token make 3.8 nats at 16,000 tokens, and a cap of 2 leaves an effective sample of 6%. The geometric mean is
    the product's root by the number of generated tokens, one weight for the sequence whose size does not depend on its
    length. Capping, masking, batch normalisation and ``rollout_corr/`` metrics are verl's of the sequence level.
    """

    @around(module, "compute_rollout_correction_weights")
    def compute_rollout_correction_weights(
        verls: Any, log_ratio: Any, response_mask: Any, rollout_is: str = "token", *args: Any, **kwargs: Any
    ) -> Any:
        if rollout_is == GEOMETRIC:
            # verl sums over the sequence: shares of the sum by the number of tokens add up to the mean.
            log_ratio = log_ratio / response_mask.sum(-1, keepdim=True).clamp(min=1)
            rollout_is = "sequence"
        return verls(log_ratio, response_mask, rollout_is, *args, **kwargs)


def weights_alone() -> AbstractContextManager[None]:
    """verl's weights without its twenty statistics of them, which fail where no token is generated, as in a micro-batch."""
    from verl.trainer.ppo import rollout_corr_helper

    return replaced(rollout_corr_helper, "compute_is_metrics", lambda *_, **__: {})


def survive_masks(module: Any) -> None:
    """Let the effective sample size of a batch without weights be 0.

    With ``rollout_is_threshold=lower_upper`` all weights of a batch may be 0, most easily at the sequence level. The batch
    has no gradient then, which is right, but ``1 / mean(weight^2)`` ends the training with a ``ZeroDivisionError``.
    """

    @around(module, "compute_is_metrics")
    def compute_is_metrics(verls: Any, rollout_is_weights: Any, *args: Any, **kwargs: Any) -> Any:
        if rollout_is_weights.any():
            return verls(rollout_is_weights, *args, **kwargs)
        metrics = verls(rollout_is_weights + _TINY, *args, **kwargs)
        metrics["rollout_is_eff_sample_size"] = 0.0
        return metrics
