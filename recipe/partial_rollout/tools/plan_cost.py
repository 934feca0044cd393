"""GPU-hours and money of a plan: what 1,000 steps cost where trainer and engines share the GPUs.

A step is its round and then its training, and holds all GPUs for both. ``plan_separate`` is about separate placement, in
which the two run at the same time on GPUs of their own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from recipe.partial_rollout.tools.planner.engine_curve import PRESETS
from recipe.partial_rollout.tools.run_record import RunRecord
from recipe.partial_rollout.tools.table import Table

STEPS = 1_000


@dataclass(frozen=True, slots=True)
class Prices:
    """What turns the seconds of a round into a cost."""

    gpus: int
    """of the whole job"""
    train_s: float
    """seconds of a step outside its rollout"""
    price: float | None
    """of a GPU-hour, in any currency; None: unknown"""

    def gpu_hours(self, round_s: float) -> float:
        """GPU-hours of 1,000 steps with rounds of ``round_s`` seconds.

        >>> Prices(gpus=8, train_s=60.0, price=2.0).gpu_hours(120.0)
        400.0
        """
        return STEPS * (round_s + self.train_s) * self.gpus / 3600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a plan's costs."""
    parser.add_argument("--gpus-per-replica", type=int, default=1, metavar="N", help="GPUs of one engine replica")
    parser.add_argument(
        "--train-seconds",
        type=float,
        metavar="S",
        help="seconds of a step outside its rollout, for the GPU-hours (default: the median of --run)",
    )
    parser.add_argument("--price", type=float, metavar="MONEY", help="price of a GPU-hour, for the cost")


def prices_of(options: argparse.Namespace, record: RunRecord | None, replicas: int) -> Prices | None:
    """The prices that ``options`` and the run give; None if neither says how long a step trains.

    Raises:
        ValueError: an option is out of its range; names it.
    """
    if options.gpus_per_replica < 1:
        raise ValueError(f"--gpus-per-replica is {options.gpus_per_replica}; it should be at least 1")
    for name in ("train_seconds", "price"):
        value = getattr(options, name)
        if value is not None and not value >= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}; it should be at least 0")
    train_s = options.train_seconds
    if train_s is None:
        if record is None:
            return None
        train_s = statistics.median(step.seconds("step") - step.seconds("gen") for step in record.steps)
    return Prices(replicas * options.gpus_per_replica, train_s, options.price)


def cost_table(rounds: Sequence[tuple[str, float]], prices: Prices) -> Table:
    """A row for each schedule of ``rounds``: its name, and the seconds of a round; the first is the reference."""
    base = prices.gpu_hours(rounds[0][1])
    rows = []
    for name, round_s in rounds:
        hours = prices.gpu_hours(round_s)
        money = "-" if prices.price is None else f"{hours * prices.price:,.0f}"
        share = f"{hours / base:.2f}" if base else "-"
        rows.append([name, f"{round_s:.1f}", f"{round_s + prices.train_s:.1f}", f"{hours:,.1f}", money, share])
    title = f"Cost of {STEPS:,} steps on {prices.gpus:,} GPUs, which train for {prices.train_s:.1f} s a step"
    return Table(title, ["policy, overlap", "round s", "step s", "GPU-hours", "cost", "x noPR"], rows)


def costs(
    options: argparse.Namespace, record: RunRecord | None, replicas: int, rounds: Sequence[tuple[str, float]]
) -> str:
    """The costs of the schedules in ``rounds`` (see ``cost_table``) as text, and where their engine curve comes from.

    Raises:
        ValueError: an option is out of its range; names it.
    """
    prices = prices_of(options, record, replicas)
    if prices is None:
        shown = "no GPU-hours: give --train-seconds, the seconds of a step outside its rollout, or --run"
    else:
        shown = cost_table(rounds, prices).console()
    return f"{shown}\n\n{curve_source(options.curve)}"


def curve_source(given: str | None) -> str:
    """Where the engine curve of a plan comes from, in a line."""
    if given in PRESETS:
        return f"engine curve: ASSUMED (preset {given}); plan --measure measures the one of your engine"
    return "engine curve: fitted to the calls of --run" if given is None else f"engine curve: {given}"
