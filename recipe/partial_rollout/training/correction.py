"""Which behaviour weights fit each of verl's policy losses."""

from __future__ import annotations

from enum import StrEnum


class WeightLevel(StrEnum):
    """The likelihood ratio that weights a token; the values of ``rollout_correction.rollout_is``."""

    TOKEN = "token"
    """the token's own ratio"""
    GEOMETRIC = "geometric"
    """the geometric mean over its sequence; its noise does not grow with length (``verl_ext.geometric_weights``)"""
    SEQUENCE = "sequence"
    """the product over its sequence; unbiased, but its noise grows with length"""


SEQUENCE_LEVEL_LOSSES = frozenset({"gspo", "geo_mean"})
"""verl's policy losses with one ratio for a sequence; token-level weights do not fit them"""


def weight_level(loss_mode: str) -> WeightLevel:
    """The behaviour weights that fit verl's policy loss ``loss_mode``."""
    return WeightLevel.GEOMETRIC if loss_mode in SEQUENCE_LEVEL_LOSSES else WeightLevel.TOKEN
