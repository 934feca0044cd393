"""Words of the behaviour correction: which one a run has, where the proximal policy comes from, what weights fit a loss."""

from __future__ import annotations

from enum import StrEnum


class Correction(StrEnum):
    """How the loss treats tokens that older weights sampled."""

    DECOUPLED = "decoupled"
    """weighted by ``pi_prox / pi_behav`` (AReaL, arXiv:2505.24298, equation 5)"""
    NONE = "none"
    """as if the proximal policy had sampled them; for ablations"""


class Proximal(StrEnum):
    """Where the proximal log-probs, those of the weights before the update, come from."""

    RECOMPUTE = "recompute"
    """a forward pass over the batch"""
    INTERPOLATE = "interpolate"
    """between behaviour and current log-probs by version age, inside the loss (AReaL, ``prox_logp_method: loglinear``)"""


class WeightLevel(StrEnum):
    """Whose likelihood ratio weighs a token; the values of ``rollout_correction.rollout_is``."""

    TOKEN = "token"
    """its own"""
    GEOMETRIC = "geometric"
    """the geometric mean over its sequence, whose noise does not grow with length (``verl_ext.geometric_weights``)"""
    SEQUENCE = "sequence"
    """the product over its sequence: unbiased, but with noise that grows with length"""


SEQUENCE_LEVEL_LOSSES = frozenset({"gspo", "geo_mean"})
"""verl's policy losses with one ratio for a sequence, which token-level weights would tear apart"""


def weight_level(loss_mode: str) -> WeightLevel:
    """The behaviour weights that fit verl's policy loss ``loss_mode``."""
    return WeightLevel.GEOMETRIC if loss_mode in SEQUENCE_LEVEL_LOSSES else WeightLevel.TOKEN
