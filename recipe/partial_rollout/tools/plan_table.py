"""The forecasts of a plan as a table, and what it recommends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from recipe.partial_rollout.tools.planner.rounds import Forecast
from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.table import Table

TESTED_OVERLAP = 1.5
"""largest that several pairs of runs have (docs/learning.md): no other is recommended"""
TESTED_BOUND = 8
"""largest ``max_staleness`` of them"""
WORTH = 0.05
"""share of time that more overlap must save to be worth its staleness"""


@dataclass(frozen=True, slots=True)
class Option:
    """noPR, whose ``overlap`` is 0, or PR at an overlap. Times are for equal work, relative to noPR's."""

    overlap: float
    forecast: Forecast
    rollout: float
    step: float | None
    """None: how long a step takes outside rollout is not known"""

    @classmethod
    def of(cls, overlap: float, forecast: Forecast, base: Forecast, outside_s: float | None) -> Self:
        """``outside_s``: seconds of a step outside rollout for each trained token."""
        mine, theirs = 1 / forecast.trained_tokens_per_s, 1 / base.trained_tokens_per_s
        step = None if outside_s is None else (mine + outside_s) / (theirs + outside_s)
        return cls(overlap, forecast, mine / theirs, step)

    @property
    def time(self) -> float:
        """Relative time of a step, or of its rollout if that of a step is not known."""
        return self.rollout if self.step is None else self.step


def plan_table(plans: Sequence[Option]) -> Table:
    """A row for each of ``plans``."""
    columns = [
        ("", lambda plan: f"PR, overlap {plan.overlap:g}" if plan.overlap else "noPR"),
        ("rollout, s", lambda plan: f"{plan.forecast.round_s:,.1f}"),
        ("rollout / noPR", lambda plan: units.decimal(plan.rollout)),
        ("step / noPR", lambda plan: units.decimal(plan.step)),
        ("staleness, mean", lambda plan: f"{plan.forecast.staleness_mean:.2f}"),
        ("p95", lambda plan: f"{plan.forecast.staleness_p95:.0f}"),
    ]
    if plans[0].step is None:
        del columns[3]
    return Table.of("Forecast: time for equal work, noPR = 1, less is better", plans, columns)


def advice(plans: Sequence[Option], bound: int) -> str:
    """The recommendation: the smallest overlap that no larger one beats by ``WORTH``.

    Args:
        bound: ``max_staleness``.
    """
    if bound > TESTED_BOUND:
        return f"nothing to recommend: learning was tested up to max_staleness={TESTED_BOUND} (docs/learning.md)"
    tested = [plan for plan in plans if plan.overlap <= TESTED_OVERLAP]
    if len(tested) < 2:
        return (
            f"nothing to recommend: no --overlaps up to max_staleness={bound} whose learning was tested "
            f"(up to {TESTED_OVERLAP:g})"
        )
    enough = min(plan.time for plan in tested) / (1 - WORTH)
    found = next(plan for plan in tested if plan.time <= enough)
    what = "rollout" if found.step is None else "step"
    if not found.overlap:
        return f"recommended: noPR (partial_rollout.enable=False); PR saves less than {WORTH:.0%} of the {what} time"
    largest = "it is the largest of --overlaps whose learning was tested"
    why = largest if found is tested[-1] else f"a larger one saves less than {WORTH:.0%} of that"
    return (
        f"recommended: partial_rollout.overlap={found.overlap:g}, max_staleness={bound}: {found.time:.2f} of noPR's {what} "
        f"time; {why}. The price is a mean staleness of {found.forecast.staleness_mean:.2f}: the reward comes about as "
        "many steps later, once. Let the learning rate decay if it is near the highest that noPR holds (docs/learning.md)"
    )
