"""Separate placement beside colocated, as a table of whole steps, and what it recommends."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe.partial_rollout.planner.rounds import smallest_worthwhile
from recipe.partial_rollout.tools.plan_cost import STEPS, Prices, curve_source
from recipe.partial_rollout.tools.table import Table

if TYPE_CHECKING:
    from recipe.partial_rollout.planner.separate import Devices
    from recipe.partial_rollout.tools.plan_separate import SeparateOption
    from recipe.partial_rollout.tools.plan_table import Option


@dataclass(frozen=True, slots=True)
class _Step:
    """A whole step of a colocated forecast, which trains on all devices after its round."""

    name: str
    overlap: float
    step_s: float
    train_s: float
    tokens_per_s: float
    staleness: float

    @classmethod
    def of(cls, plan: Option, devices: Devices) -> _Step:
        made = plan.forecast
        tokens = made.trained_tokens_per_s * made.round_s
        train_s = devices.trainer.seconds(tokens, devices.count)
        step_s = made.round_s + train_s
        name = plan.name if not plan.overlap else f"colocated {plan.name}"
        return cls(name, plan.overlap, step_s, train_s, tokens / step_s, made.staleness_mean)


def shown(
    options: argparse.Namespace, plans: Sequence[Option], made: Sequence[SeparateOption], devices: Devices
) -> str:
    """The table of whole steps, what it recommends, and what it rests on; the first of ``plans`` is noPR."""
    steps = [_Step.of(plan, devices) for plan in plans]
    table = steps_table(plans, made, devices, options.price)
    notes = [
        advice(steps, made, devices, options.min_gain),
        assumptions(options, devices),
        curve_source(options.curve),
    ]
    return "\n\n".join([table.console(), *notes])


def steps_table(
    plans: Sequence[Option], made: Sequence[SeparateOption], devices: Devices, price: float | None
) -> Table:
    """A row for each colocated plan, the first of which is noPR, and for the best split at each overlap."""
    prices = Prices(devices.count, 0.0, price)
    base = _Step.of(plans[0], devices).tokens_per_s

    def row(
        name: str, split: str, step_s: float, speed: float, shares: Sequence[float | None], ages: list[str]
    ) -> list[str]:
        hours = prices.gpu_hours(step_s)
        cost = "-" if price is None else f"{hours * price:,.0f}"
        idle = ["-" if share is None else f"{share:.0%}" for share in shares]
        figures = [f"{step_s:.1f}", f"{speed:,.0f}", f"{speed / base:.2f}", *idle, *ages, f"{hours:,.1f}", cost]
        return [name, split, *figures]

    rows = []
    for plan in plans:
        step, f = _Step.of(plan, devices), plan.forecast
        waits = 1 - step.train_s / step.step_s
        ages = [f"{f.staleness_mean:.2f}", f"{f.staleness_max}", f"{f.token_age_mean:.2f}"]
        rows.append(row(step.name, "all", step.step_s, step.tokens_per_s, [waits, 1 - waits, None], ages))
    for option in made:
        f = option.forecast
        split = f"{f.engines * devices.per_replica} + {f.trainers}"
        ages = [f"{f.staleness_mean:.2f}", f"{f.staleness_max}", f"{f.token_age_mean:.2f}"]
        shares = [f.trainer_idle, f.engine_idle, f.engine_held]
        name = f"separate {option.policy} {option.overlap:g}"
        rows.append(row(name, split, f.step_s, f.trained_tokens_per_s, shares, ages))
    header = [
        "placement, overlap",
        "engines + trainer",
        "step s",
        "tokens/s",
        "x noPR",
        "trainer waits",
        "engines idle",
    ]
    header += ["held", "staleness", "max", "token age", f"GPU-hours of {STEPS:,} steps", "cost"]
    return Table(f"Forecast of whole steps on {devices.count:,} GPUs", header, rows)


def advice(steps: Sequence[_Step], made: Sequence[SeparateOption], devices: Devices, min_gain: float) -> str:
    """The best split, beside the fastest colocated step that is no staler.

    Args:
        steps: of the colocated plans; the first is noPR.
        min_gain: share of speed that the next larger overlap must gain.
    """
    speeds = [(option.overlap, option.forecast.trained_tokens_per_s) for option in made]
    overlap = smallest_worthwhile(speeds, min_gain)
    option = next(option for option in made if option.overlap == overlap)
    found = option.forecast
    # Both forecasts have the same mean at the same overlap, but for chance.
    fresh = [step for step in steps if step.staleness <= found.staleness_mean or step.overlap <= overlap]
    rival = max(fresh, key=lambda step: step.tokens_per_s)
    ratio = rival.tokens_per_s / found.trained_tokens_per_s
    best = "separate" if ratio < 1 else "colocated"
    others = [
        found.trained_tokens_per_s / other.trained_tokens_per_s - 1 for other in option.tried if other is not found
    ]
    more = " to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(others), max(others)))) if others else ""
    near = f"; the splits tried beside it take {more} longer" if others else ""
    starves = "; under an overlap of 1 the trainer waits for samples that started after its last batch" * (overlap < 1)
    return (
        f"forecast to be faster at equal staleness: {best}. Best split of separate placement: overlap={overlap:g}, "
        f"{found.engines * devices.per_replica} of {devices.count} GPUs decode and {found.trainers} train: "
        f"{found.step_s:.1f} s a step at mean staleness {found.staleness_mean:.2f}, {ratio:.2f} of the time a token of "
        f"{rival.name} ({rival.step_s:.1f} s){near}{starves}"
    )


def assumptions(options: argparse.Namespace, devices: Devices) -> str:
    """What the speeds of trainer and weight update come from."""
    trainer, update = devices.trainer, devices.update
    if options.train_seconds is not None:
        source = "from --train-seconds"
    else:
        source = "from --run" if options.run_directory else f"ASSUMED (preset {options.curve})"
    return (
        f"trainer, {source}: {trainer.fixed_s:g} s a batch and {trainer.token_s * 1e3:.3g} ms a token of one GPU; "
        f"new weights, assumed: {update.stage_s:g} s while engines decode, {update.hold_s:g} s while they stand still. "
        "This is a forecast: no run can place trainer and engines separately yet (docs/placement.md)"
    )
