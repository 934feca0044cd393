"""The forecasts of a plan as a table, and what it recommends."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.partial_rollout.config.settings import SchedulingPolicy
from recipe.partial_rollout.tools.planner.rounds import Forecast, smallest_worthwhile
from recipe.partial_rollout.tools.table import Table

TESTED_OVERLAP = 1.5
"""largest that several pairs of runs have, all under the policy ``bounded`` (docs/learning.md): no other is recommended"""
TESTED_BOUND = 8
"""largest ``max_staleness`` of them"""
MIN_GAIN = 0.05
"""share of speed that the next larger overlap must gain to be recommended"""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of a plan."""

    policy: str
    overlap: float
    overtake: float | None
    forecast: Forecast

    @property
    def name(self) -> str:
        if not self.overlap:
            return self.policy
        limit = "" if self.overtake is None else f", overtake {self.overtake:g}"
        return f"{self.policy} {self.overlap:g}{limit}"


def plan_table(plans: list[Option]) -> Table:
    """A row for each of ``plans``; the first is noPR, the reference of all columns."""
    base = plans[0].forecast

    def over_base(plan: Option) -> str:
        return f"{plan.forecast.trained_tokens_per_s / base.trained_tokens_per_s:.2f}"

    columns = (
        ("policy, overlap", lambda plan: plan.name),
        ("round s", lambda plan: f"{plan.forecast.round_s:.1f}"),
        ("tokens/s", lambda plan: f"{plan.forecast.trained_tokens_per_s:,.0f}"),
        ("x noPR", over_base),
        ("staleness", lambda plan: f"{plan.forecast.staleness_mean:.2f}"),
        ("p95", lambda plan: f"{plan.forecast.staleness_p95:.0f}"),
        ("max", lambda plan: f"{plan.forecast.staleness_max}"),
        ("token age", lambda plan: f"{plan.forecast.token_age_mean:.2f}"),
        ("off-policy", lambda plan: f"{plan.forecast.off_policy_fraction:.2f}"),
        ("first 5 length", lambda plan: f"{plan.forecast.first_length:.2f}"),
    )
    return Table.of("Forecast of the rollout", plans, columns)


def advice(plans: list[Option], bound: int) -> str:
    """The recommendation, for the default limit on overtaking, or the first one planned.

    Args:
        bound: ``max_staleness``.
    """
    base = plans[0].forecast.trained_tokens_per_s
    if bound > TESTED_BOUND:
        return f"nothing to recommend: learning was tested up to max_staleness={TESTED_BOUND} (docs/learning.md)"
    policy = SchedulingPolicy.BOUNDED
    options = [plan for plan in plans[1:] if plan.policy == policy and plan.overlap <= TESTED_OVERLAP]
    if not options:
        tested = f"{policy} up to {TESTED_OVERLAP:g}"
        return f"nothing to recommend: no --overlaps up to max_staleness={bound} whose learning was tested ({tested})"
    limits = [plan.overtake for plan in options]
    overtake = None if None in limits else limits[0]
    rows = {plan.overlap: plan for plan in options if plan.overtake == overtake}
    speeds = [(0.0, base), *((overlap, plan.forecast.trained_tokens_per_s) for overlap, plan in rows.items())]
    overlap = smallest_worthwhile(speeds, MIN_GAIN)
    if overlap not in rows:
        return f"recommended: partial_rollout.enable=False; the smallest overlap planned gains less than {MIN_GAIN:.0%}"
    found = rows[overlap].forecast
    limit = "" if overtake is None else f", scheduling.overtake={overtake:g}"
    largest = "the largest planned whose learning was tested" if overlap == max(rows) else None
    why = largest or f"the next one gains less than {MIN_GAIN:.0%}"
    return (
        f"recommended: partial_rollout.overlap={overlap:g} with scheduling.policy={policy}{limit}, max_staleness={bound}: "
        f"rollout {found.trained_tokens_per_s / base:.2f} x noPR; {why}. It costs mean staleness "
        f"{found.staleness_mean:.2f}: the reward comes about as many steps later, once; let the learning rate decay "
        "if it is near the highest that noPR holds (docs/learning.md)"
    )
