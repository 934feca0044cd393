"""Separate placement in a plan: trainer and engines on devices of their own, beside both in turn on all of them.

A forecast only: the run-time mode does not exist yet (docs/placement.md).
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
from recipe.partial_rollout.planner.engine_curve import PRESETS, Cluster
from recipe.partial_rollout.planner.rounds import warmup_rounds
from recipe.partial_rollout.planner.samples import LengthTrace
from recipe.partial_rollout.planner.separate import (
    TRAINER_PRESETS,
    UPDATE_PRESET,
    Devices,
    SeparateForecast,
    TrainerRate,
    WeightUpdate,
    balanced,
    best_split,
    forecast_separate,
)
from recipe.partial_rollout.records.run import RunRecord
from recipe.partial_rollout.tools.plan_cost import Prices, prices_of

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
        help="separate: also forecast trainer and engines on devices of their own, and choose the split "
        "(a forecast only: no run can do it yet)",
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
