"""The arms of the convergence study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipe.partial_rollout.tools.study import BASELINE, Arm


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


def arms(bounds: Sequence[Bound], *, behaviour_clipping: bool = False) -> list[Arm]:
    """The baseline, then PR with correction and without at each bound; an arm is called ``kind_bound``.

    Args:
        behaviour_clipping: also PPO that clips to the behaviour policy, AReaL's "naive PPO".
    """
    found = [Arm(BASELINE, ("partial_rollout.enable=False",))]
    for bound in bounds:
        sizes = (f"partial_rollout.max_staleness={bound.staleness}", f"partial_rollout.overlap={bound.overlap:g}")
        off = (*sizes, "partial_rollout.correction=none")
        found.append(Arm(f"corrected_{bound}", (*sizes, "partial_rollout.correction=decoupled")))
        found.append(Arm(f"uncorrected_{bound}", off))
        if behaviour_clipping:
            found.append(Arm(f"clipped_{bound}", (*off, "algorithm.rollout_correction.bypass_mode=True")))
    return found


def bound_of(arm: str) -> Bound | None:
    """Of an arm's name; None for the baseline."""
    _, _, bound = arm.partition("_")
    return Bound.parse(bound) if bound else None
