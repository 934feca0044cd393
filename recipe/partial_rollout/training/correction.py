"""Which behaviour weights fit a policy loss of verl's."""

from __future__ import annotations

from enum import StrEnum


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
