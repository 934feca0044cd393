"""The arms of ``study convergence``: ways to learn from stale samples, at each bound on staleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from recipe.partial_rollout.tools.study.arm import BASELINE, Arm
from recipe.partial_rollout.tools.study.picture import OTHERS_HUE, OURS_HUE


class Kind(NamedTuple):
    """A way to learn from stale samples."""

    caption: str
    hue: str
    """of its curve"""
    overrides: tuple[str, ...]


KINDS = {
    "corrected": Kind("PR, corrected", OURS_HUE, ("partial_rollout.correction=decoupled",)),
    "uncorrected": Kind("PR, correction=none", OTHERS_HUE, ("partial_rollout.correction=none",)),
    # AReaL's "naive PPO"
    "clipped": Kind(
        "PR, behaviour clipping",
        "#CC79A7",
        ("partial_rollout.correction=none", "algorithm.rollout_correction.bypass_mode=True"),
    ),
    "interpolated": Kind(
        "PR, proximal=interpolate",
        "#009E73",
        ("partial_rollout.correction=decoupled", "partial_rollout.proximal=interpolate"),
    ),
    "ramped": Kind(
        "PR, ramp_rounds=8", "#E69F00", ("partial_rollout.correction=decoupled", "partial_rollout.ramp_rounds=8")
    ),
}
USUAL = ("corrected", "uncorrected")
"""kinds that are trained unless others are asked for"""


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound on staleness, and how hard it is leant on."""

    staleness: int
    """``partial_rollout.max_staleness``"""
    overlap: float
    """``partial_rollout.overlap``: mean staleness is about this"""

    @classmethod
    def parse(cls, text: str) -> Bound:
        """``K`` (as many spare groups as the bound allows) or ``K:overlap``.

        Raises:
            ValueError: it is neither.
        """
        staleness, _, overlap = text.partition(":")
        return cls(int(staleness), float(overlap or staleness))

    def __str__(self) -> str:
        """As ``parse`` reads it."""
        return f"{self.staleness}" if self.overlap == self.staleness else f"{self.staleness}:{self.overlap:g}"

    @property
    def label(self) -> str:
        """In words."""
        return f"max_staleness {self.staleness}, overlap {self.overlap:g}"


def arms(bounds: Sequence[Bound], kinds: Sequence[str] = USUAL) -> list[Arm]:
    """The baseline, then PR of each kind at each bound; an arm is called ``kind_bound``."""
    found = [BASELINE]
    for bound in bounds:
        sizes = (f"partial_rollout.max_staleness={bound.staleness}", f"partial_rollout.overlap={bound.overlap:g}")
        found += [
            Arm(f"{name}_{bound}", f"{kind.caption}, {bound.label}", (*sizes, *kind.overrides))
            for name, kind in KINDS.items()
            if name in kinds
        ]
    return found


def bound_of(arm: str) -> Bound | None:
    """Of an arm's name; None for the baseline."""
    _, _, bound = arm.partition("_")
    return Bound.parse(bound) if bound else None
