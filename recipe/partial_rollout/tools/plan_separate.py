"""Separate placement in a plan: trainer and engines on devices of their own, beside both in turn on all of them.

A forecast; docs/performance.md has what was measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tqdm import tqdm

from recipe.partial_rollout.config.choices import SchedulingPolicy
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.tools.plan_cost import STEPS, Prices, curve_source, prices_of
from recipe.partial_rollout.tools.planner.engine_curve import PRESETS, Cluster
from recipe.partial_rollout.tools.planner.rounds import WeightUpdate, smallest_worthwhile, warmup_rounds
from recipe.partial_rollout.tools.planner.samples import LengthTrace
from recipe.partial_rollout.tools.run_record import RunRecord
from recipe.partial_rollout.tools.split_forecast import (
    TRAINER_PRESETS,
    UPDATE_PRESET,
    Devices,
    SeparateForecast,
    TrainerRate,
    balanced,
    best_split,
    forecast_separate,
)
from recipe.partial_rollout.tools.table import Table

if TYPE_CHECKING:
    from recipe.partial_rollout.tools.plan_table import Option


COLOCATED, SEPARATE = "colocated", "separate"
_OWN = ("train_fixed", "stage_seconds", "hold_seconds")
"""options of separate placement alone"""


@dataclass(frozen=True, slots=True)
class SeparateOption:
    """One row: the best split at one overlap, and its neighbours."""

    policy: str
    overlap: float
    forecast: SeparateForecast
    tried: list[SeparateForecast]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of separate placement."""
    parser.add_argument(
        "--placement",
        choices=[COLOCATED, SEPARATE],
        default=COLOCATED,
        help="separate: also forecast trainer and engines on devices of their own, and choose the split",
    )
    parser.add_argument(
        "--train-fixed",
        type=float,
        metavar="S",
        help="separate: seconds of --train-seconds that more devices do not shorten (default: 0, or the preset's)",
    )
    parser.add_argument(
        "--stage-seconds",
        type=float,
        metavar="S",
        help="separate: seconds in which new weights travel while engines decode (default: 0, or the preset's)",
    )
    parser.add_argument(
        "--hold-seconds",
        type=float,
        metavar="S",
        help="separate: seconds in which all engines stand still to load new weights (default: the preset's)",
    )


def check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense together.

    Raises:
        ValueError: names the option.
    """
    for name in _OWN:
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and options.placement != SEPARATE:
            raise ValueError(f"{option} is {value:g}; it needs --placement separate")
        if value is not None and not value >= 0:
            raise ValueError(f"{option} is {value:g}; it should be at least 0")
    if options.placement == SEPARATE and options.validate:
        raise ValueError("--placement separate with --validate: a replayed run has the placement that it had")
    if options.placement == SEPARATE and options.measure:
        raise ValueError("--placement separate with --measure: that only measures an engine; plan with its curve later")


def devices_of(
    options: argparse.Namespace, record: RunRecord | None, cluster: Cluster, lengths: LengthTrace, admission: Admission
) -> Devices:
    """The devices, with the speed of the trainer by ``--train-seconds``, the run, or the preset of ``--curve``.

    Raises:
        ValueError: there is too little to split, or a speed is missing; names the option.
    """
    if cluster.replicas < 2:
        raise ValueError(
            "--replicas is 1; --placement separate needs at least 2: one decodes, and the other's GPUs train"
        )
    if not any(0 < overlap <= admission.max_staleness for overlap in options.overlaps):
        raise ValueError(
            f"no --overlaps between 0 and max_staleness={admission.max_staleness}: without spare groups one side of "
            "separate placement always waits for the other"
        )
    prices = prices_of(options, record, cluster.replicas)
    count = cluster.replicas * options.gpus_per_replica
    batch_tokens = lengths.mean * admission.batch_groups * admission.samples_per_group
    if prices is None:
        trainer = _preset_rate(options)
    elif record is not None and options.train_seconds is None:
        # What the run's own devices took for its own batches.
        tokens = statistics.mean(sum(step.lengths) for step in record.steps)
        trainer = _rate(options, prices, tokens, record.settings.replicas * options.gpus_per_replica)
    else:
        trainer = _rate(options, prices, batch_tokens, count)
    return Devices(cluster.replicas, options.gpus_per_replica, trainer, _update(options))


def _preset_rate(options: argparse.Namespace) -> TrainerRate:
    preset = TRAINER_PRESETS.get(options.curve)
    if preset is None:
        raise ValueError(
            "--train-seconds is missing: give it, --run, or a --curve whose trainer has a preset "
            f"({' or '.join(TRAINER_PRESETS)})"
        )
    return preset if options.train_fixed is None else replace(preset, fixed_s=options.train_fixed)


def _rate(options: argparse.Namespace, prices: Prices, tokens: float, devices: int) -> TrainerRate:
    fixed = options.train_fixed or 0.0
    if fixed > prices.train_s:
        raise ValueError(
            f"--train-fixed is {fixed:g}; it should be at most the {prices.train_s:g} s that a step trains"
        )
    return TrainerRate.measured(prices.train_s, fixed, tokens, devices)


def _update(options: argparse.Namespace) -> WeightUpdate:
    preset = UPDATE_PRESET if options.curve in PRESETS else None
    hold, stage = options.hold_seconds, options.stage_seconds
    if hold is None and preset is None:
        raise ValueError(
            "--hold-seconds is missing: how long engines stand still to load weights; no run measures it yet"
        )
    return WeightUpdate(
        stage_s=stage if stage is not None else preset.stage_s if preset else 0.0,
        hold_s=hold if hold is not None else preset.hold_s if preset else 0.0,
    )


def forecasts(
    options: argparse.Namespace,
    plans: Sequence[Option],
    admission: Admission,
    cluster: Cluster,
    lengths: LengthTrace,
    devices: Devices,
) -> list[SeparateOption]:
    """The best split for each of the colocated ``plans``."""
    found: list[SeparateOption] = []
    for plan in tqdm(plans, desc="splits", leave=False):
        sized = replace(admission, overlap=plan.overlap)
        scheduling = Scheduling(SchedulingPolicy(plan.policy), plan.overtake)

        def made(engines: int, sized: Admission = sized, scheduling: Scheduling = scheduling) -> SeparateForecast:
            warmup = warmup_rounds(sized.overlap)
            return forecast_separate(
                sized, scheduling, cluster, lengths, devices, engines, warmup=warmup, steps=options.rounds
            )

        made_tokens = plan.forecast.trained_tokens_per_s * plan.forecast.round_s
        start = found[-1].forecast.engines if found else balanced(devices, plan.forecast.round_s, made_tokens)
        best, tried = best_split(made, start, devices.replicas - 1)
        found.append(SeparateOption(plan.policy, plan.overlap, best, tried))
    return found


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
        "This is a forecast: separate placement has run on CPU cores only (docs/placement.md)"
    )
