"""Metrics of a batch's behaviour weights ``pi_prox / pi_behav``: mean and effective sample size."""

from __future__ import annotations

import torch
from verl.protocol import DataProto


def effective_sample_size(mean: float, square: float) -> float:
    """Kish's ``(sum w)^2 / (n sum w^2)``, 0 to 1: the share of tokens that, equally weighted, would count as much.

    Args:
        mean, square: means of the weights and of their squares. If every weight is 0, the result is 0.
    """
    # verl averages micro-batches, so rounding can lift the result slightly above 1.
    return min(1.0, mean * mean / square) if square > 0 else 0.0


def weight_metrics(batch: DataProto) -> dict[str, float]:
    """``behaviour_weight/mean`` and ``behaviour_weight/ess`` over generated tokens; empty if the batch has no weights.

    Args:
        batch: with ``response_mask`` and, if the correction is on, ``rollout_is_weights``, both [B, R].
    """
    if "rollout_is_weights" not in batch.batch:
        return {}
    weights = batch.batch["rollout_is_weights"][batch.batch["response_mask"] > 0].to(torch.float64)
    if not len(weights):
        return {}
    mean, square = weights.mean().item(), weights.square().mean().item()
    return {"behaviour_weight/mean": mean, "behaviour_weight/ess": effective_sample_size(mean, square)}
