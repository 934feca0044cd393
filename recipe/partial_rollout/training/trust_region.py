"""A trust region around the behaviour policy: how far the trained policy may be from the one that sampled a token.

Equation 5 clips ``r = pi_theta / pi_prox``. With one update a batch ``r`` is 1, the clip never acts, and nothing limits
``rho = pi_theta / pi_behav``. A region does. With ``delta = log rho``, the advantage ``A`` and the bounds ``eps``, a token
is outside if it has moved in the direction of its advantage (``delta * A > 0``) and

====== =============================================================================================================
mask   ``rho > 1 + eps_high`` or ``rho < 1 - eps_low``
tv     ``pi_theta - pi_behav > eps_high`` or ``< -eps_low``: DPPO with the binary total variation of the sampled token
       (arXiv:2602.04879; the bounds 0.15 are those of verl's example script)
m2     it is one of those with the largest ``delta^2``, which are taken out until the mean of ``delta^2`` over the tokens
       that are left, among those that moved so, is at most ``eps_high`` (M2PO, arXiv:2510.01161, whose bound is 0.04; its
       published code takes the mean over these tokens too, but clips at the largest that is left, and never inside
       [0.7, 1.5])
====== =============================================================================================================

A token outside gets the weight 0. Every loss that the recipe accepts multiplies a token's loss by its
weight, so the gradient is gone and the denominator keeps the token. The loss's own clip of ``r`` stays.

**m2 sees one micro-batch**, because the gradient of the first is taken before the log-probs of the last are known. The
bound holds in each, so it holds in the mini-batch, but which tokens are masked depends on how verl splits it, and they
are at least as many as the whole mini-batch would need.

**A loss with one ratio a sequence** (``gspo``, ``geo_mean``): ``rho`` is the geometric mean over the sequence, whose tokens
are in or out together, by the sign of their mean advantage.

Entropy and KL losses are never masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from verl.trainer.ppo.rollout_corr_helper import SAFETY_BOUND
from verl.workers.config import ActorConfig

from recipe.partial_rollout.config.choices import Correction, TrustRegion
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.training.correction import SEQUENCE_LEVEL_LOSSES

_BOUNDS = {TrustRegion.TV: (0.15, 0.15), TrustRegion.M2: (0.04, 0.04)}
"""bounds that are not set, where they are not those of the loss's clip"""


def _kind(settings: PartialRolloutConfig, loss_mode: str) -> TrustRegion:
    """What ``auto`` stands for; every other kind as it is.

    A sequence-level loss has clip bounds of 3e-4, made for the single update that it starts from: as a region they would
    mask almost everything that is stale.
    """
    if settings.trust_region is not TrustRegion.AUTO:
        return settings.trust_region
    masks = settings.correction is not Correction.NONE and loss_mode not in SEQUENCE_LEVEL_LOSSES
    return TrustRegion.MASK if masks else TrustRegion.NONE


@dataclass(frozen=True, slots=True)
class BehaviourRegion:
    """The region of a run, as the worker's loss applies it."""

    kind: TrustRegion
    """any but ``auto`` and ``none``"""
    low: float
    """bound below, of the ratio or the probability"""
    high: float
    """bound above; of ``m2``, on the mean squared log-ratio"""
    per_sequence: bool
    """whether the loss has one ratio a sequence"""

    @classmethod
    def of(cls, settings: PartialRolloutConfig, actor: DictConfig) -> BehaviourRegion | None:
        """The region that the settings ask for, None for none; ``actor`` is verl's, checked."""
        kind = _kind(settings, actor.policy_loss.loss_mode)
        if kind is TrustRegion.NONE:
            return None
        low, high = _BOUNDS.get(kind) or clip_bounds(actor)
        return cls(
            kind,
            low if settings.trust_region_low is None else settings.trust_region_low,
            high if settings.trust_region_high is None else settings.trust_region_high,
            per_sequence=actor.policy_loss.loss_mode in SEQUENCE_LEVEL_LOSSES,
        )

    def outside(
        self, current: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """[B, R] bool, generated tokens that are outside the region.

        Args:
            current, behaviour: [B, R] log-probs. advantages: [B, R]. mask: [B, R], above 0 where the model generated.
        """
        delta = (current - behaviour).clamp(-SAFETY_BOUND, SAFETY_BOUND)
        if self.per_sequence:
            delta, advantages = (_sequence_mean(each, mask).expand_as(each) for each in (delta, advantages))
        moved = (delta.sign() * advantages.sign() > 0) & (mask > 0)
        if self.kind is TrustRegion.M2:
            return _largest(delta.square(), moved, self.high)
        change = current.exp() - behaviour.exp() if self.kind is TrustRegion.TV else delta.exp() - 1
        return moved & ((change > self.high) | (change < -self.low))


def clip_bounds(actor: DictConfig | ActorConfig) -> tuple[float, float]:
    """``clip_ratio_low`` and ``clip_ratio_high`` of verl's actor config, each ``clip_ratio`` where it is None."""
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return actor.clip_ratio if low is None else low, actor.clip_ratio if high is None else high


def masked_parts(outside: torch.Tensor, advantages: torch.Tensor, age: torch.Tensor) -> dict[str, torch.Tensor]:
    """Metrics of the masked tokens, each [B, R] bool: all, by the sign of the advantage, by age; the parts add up to all.

    Args:
        outside: [B, R] bool. advantages: [B, R].
        age: [B, R] int, versions between a token and the weights before the update.
    """
    positive = advantages > 0
    return {
        "masked": outside,
        "masked_positive": outside & positive,
        "masked_negative": outside & ~positive,
        "masked_age_0": outside & (age <= 0),
        "masked_age_1": outside & (age == 1),
        "masked_age_2_plus": outside & (age >= 2),
    }


def _sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, 1], the mean over each sequence's generated tokens, 0 where there are none."""
    generated = (mask > 0).to(values.dtype)
    return (values * generated).sum(-1, keepdim=True) / generated.sum(-1, keepdim=True).clamp(min=1)


def _largest(squares: torch.Tensor, among: torch.Tensor, bound: float) -> torch.Tensor:
    """[B, R] bool, the fewest largest ``squares`` of those in ``among`` without which their mean is at most ``bound``."""
    ascending, order = squares[among].double().sort(stable=True)
    # The mean of the smallest n never falls with n: those within the bound come first.
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
    taken = torch.zeros_like(order, dtype=torch.bool)
    taken[order] = means > bound
    return torch.zeros_like(among).masked_scatter(among, taken)
