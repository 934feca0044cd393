"""Figures of a batch's behaviour weights ``pi_prox / pi_behav``: their mean, and the effective sample that they leave."""

from __future__ import annotations

import torch
from verl.protocol import DataProto


def effective_sample_size(mean: float, square: float) -> float:
    """Kish's ``(sum w)^2 / (n sum w^2)``, 0 to 1: the share of the tokens that would do as much with equal weights.

    Args:
        mean, square: means of the weights and of their squares. Where every weight is 0 the answer is 0.
    """
    # Means that were rounded apart, as verl's of micro-batches are, can come out a hair over 1.
    return min(1.0, mean * mean / square) if square > 0 else 0.0


def weight_metrics(batch: DataProto) -> dict[str, float]:
    """``behaviour_weight/mean`` and ``behaviour_weight/ess`` over generated tokens; nothing where a batch has no weights.

    Args:
        batch: with ``response_mask`` and, where the correction is on, ``rollout_is_weights``, both [B, R].
    """
    if "rollout_is_weights" not in batch.batch:
        return {}
    weights = batch.batch["rollout_is_weights"][batch.batch["response_mask"] > 0].to(torch.float64)
    if not len(weights):
        return {}
    mean, square = weights.mean().item(), weights.square().mean().item()
    return {"behaviour_weight/mean": mean, "behaviour_weight/ess": effective_sample_size(mean, square)}
