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

    verl has two levels: a token's weight is its own ratio (``token``), or the product of all ratios of its sequence
    (``sequence``). The noise of the product grows with the length: 0.03 nats a token become 3.8 nats at 16,000 tokens,
    where a cap of 2 leaves an effective sample size of 6%. The geometric mean of the ratios is one weight for the
    sequence too, but its size does not depend on the length. Capping, masking, batch normalisation and the
    ``rollout_corr/`` metrics are those of verl's ``sequence``.
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
    """In this context verl makes no metrics of its weights, which would fail on a micro-batch without response tokens."""
    from verl.trainer.ppo import rollout_corr_helper

    return replaced(rollout_corr_helper, "compute_is_metrics", lambda *_, **__: {})


def survive_masks(module: Any) -> None:
    """Let the effective sample size of a batch without weights be 0.

    With ``rollout_is_threshold=lower_upper`` all weights of a batch may be 0, most easily at the sequence level. The
    batch has no gradient then, which is right, but ``1 / mean(weight^2)`` ends the training with a
    ``ZeroDivisionError``.
    """

    @around(module, "compute_is_metrics")
    def compute_is_metrics(verls: Any, rollout_is_weights: Any, *args: Any, **kwargs: Any) -> Any:
        if rollout_is_weights.any():
            return verls(rollout_is_weights, *args, **kwargs)
        metrics = verls(rollout_is_weights + _TINY, *args, **kwargs)
        metrics["rollout_is_eff_sample_size"] = 0.0
        return metrics
