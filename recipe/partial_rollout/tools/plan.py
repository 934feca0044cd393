"""Is partial rollout worth it for a job, and at which overlap? A forecast before anything runs.

The real ``PromptsManager`` plays rounds against a model of the engine. Response lengths and engine speed come from a
finished run (``--run``), or lengths from a distribution and the speed from an assumed curve. ``tests/studies/replay.py``
compares forecasts with measured runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipe.partial_rollout.config.keys import FINITE, ConfigError, read
from recipe.partial_rollout.config.settings import ROOT, PartialRolloutConfig, ResumeKV
from recipe.partial_rollout.tools.command_line import Parser, typed
from recipe.partial_rollout.tools.planner.engine_curve import PRESETS, Cluster, EngineCurve, fit
from recipe.partial_rollout.tools.planner.lengths import LengthTrace
from recipe.partial_rollout.tools.planner.rounds import Forecast, baseline, forecast
from recipe.partial_rollout.tools.reading.columns import CallColumns
from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.run_record import RunRecord, load_run
from recipe.partial_rollout.tools.table import Table

TESTED_OVERLAP = 1.5
"""largest overlap whose learning was measured in several pairs of noPR and PR runs (docs/learning.md); no larger one is
recommended"""
TESTED_BOUND = 8
"""largest ``max_staleness`` of those runs"""
WORTH = 0.05
"""share of time that more overlap must save to be worth its staleness"""


def _of(kind: Any, allowed: str) -> Callable[[str], Any]:
    """Return an argparse ``type`` that converts an option's text to ``kind``; ``allowed`` describes the range in its
    error."""

    def convert(text: str) -> Any:
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError:
            raise argparse.ArgumentTypeError(f"{text}: {allowed}") from None

    return convert


def parser() -> Parser:
    made = Parser(
        typed("plan"),
        "Forecast whether partial rollout is worth it for a job, and at which overlap.",
        [
            "--run outputs/quickstart/noPR",
            "--lognormal 3000 3600 18384 --curve h20-qwen3-4b --batch 64 --group 8 --replicas 8 --slots 64",
        ],
        "Response lengths, engine speed and sizes come from a finished run (--run; a noPR run shows the engine under every "
        "load), or from --lognormal, --curve and the sizes. Exit code: 2 if input is missing or cannot be trusted.",
    )
    made.add_argument(
        "--run",
        dest="run_directory",
        type=Path,
        metavar="RUN",
        help="directory of a finished run: its lengths, engine speed, sizes and keys, unless given otherwise",
    )
    made.add_argument(
        "--lognormal",
        type=_of(Annotated[float, Meta(gt=0, le=FINITE)], "above 0"),
        nargs=3,
        metavar=("MEDIAN", "MEAN", "CAP"),
        help="distribution of response lengths, in tokens",
    )
    made.add_argument(
        "--curve",
        metavar="CURVE",
        help=f"assumed engine speed: {' or '.join(PRESETS)}, or a JSON file of EngineCurve's fields",
    )
    for name, least, means in (
        ("prompt-tokens", 0, "tokens of each prompt (default: those of --run, else 0)"),
        ("batch", 1, "groups that a step trains"),
        ("group", 1, "samples in a group"),
        ("replicas", 1, "engine replicas"),
        ("slots", 1, "samples that a replica runs at the same time"),
        ("max-staleness", 0, "bound on staleness, in versions (default: that of --run, else partial_rollout's)"),
    ):
        kind = _of(Annotated[int, Meta(ge=least)], f"an integer of at least {least}")
        made.add_argument(f"--{name}", type=kind, metavar="N", help=means)
    made.add_argument(
        "--overlaps",
        type=_of(Annotated[float, Meta(gt=0, le=FINITE)], "above 0"),
        nargs="+",
        default=[0.25, 0.5, 0.75, 1.0, 1.5],
        metavar="X",
        help="values of partial_rollout.overlap to forecast",
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; exit code 2 if input is missing or cannot be trusted."""
    options = parser().parse_args(arguments)
    try:
        record = load_run(options.run_directory) if options.run_directory else None
        settings, cluster, lengths, source = inputs(options, record)
        plans = plans_of(settings, cluster, lengths, options.overlaps, seconds_outside_rollout(record))
    except (ValueError, OverflowError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{_describe(cluster, lengths, source)}\n\n{plan_table(plans).console()}\n\n{advice(plans, settings.max_staleness)}"
    )
    return 0


def inputs(
    options: argparse.Namespace, record: RunRecord | None
) -> tuple[PartialRolloutConfig, Cluster, LengthTrace, str]:
    """Return the settings (with overlap 0), the engines, the response lengths, and the origin of the engine curve as
    text.

    Args:
        record: the run of ``--run``; None without it.

    Raises:
        ValueError: an input is missing or cannot be trusted; the message is one line.
    """
    if record and record.settings.separate:
        words = "its engines decode while it trains, but the forecast is for engines and trainer that take turns"
        raise ValueError(f"{record.directory}: {words}; give a run with placement=colocated")

    def size(option: str, setting: str) -> int:
        if (given := getattr(options, option)) is not None:
            return given
        if record is None:
            raise ValueError(f"--{option} is missing: set it, or give --run RUN_DIR, from which it is read")
        return getattr(record.settings, setting)

    n, keys = size("group", "samples_per_group"), _keys_of(record)
    if options.lognormal:
        median, mean, cap = options.lognormal
        lengths = LengthTrace.lognormal(median=median, mean=mean, cap=int(cap), samples_per_group=n)
    elif record:
        lengths = LengthTrace.of_run(record)
    else:
        raise ValueError("no lengths: give --run or --lognormal")
    if options.prompt_tokens is not None:
        lengths = replace(lengths, prompt_tokens=options.prompt_tokens)
    if options.max_staleness is not None:
        keys["max_staleness"] = options.max_staleness
    keys |= {"batch_groups": size("batch", "batch_groups"), "samples_per_group": n, "enable": True, "overlap": 0.0}
    settings = PartialRolloutConfig(**keys)
    curve, source = _curve(options.curve, record)
    keeps_kv = settings.resume_kv is ResumeKV.KEEP
    cluster = Cluster(curve, size("replicas", "replicas"), size("slots", "slots_per_replica"), keeps_kv)
    return settings, cluster, lengths, source


def _keys_of(record: RunRecord | None) -> dict[str, Any]:
    """Return the values of ``partial_rollout`` in the run's ``config.yaml`` by key; a noPR run has them too.

    Keys that the file lacks have their defaults. Return {} without a record or the file.

    Raises:
        ValueError: the file cannot be read, or a key of it is wrong.
    """
    path = Path(record.directory) / "config.yaml" if record else None
    if path is None or not path.exists():
        return {}
    try:
        return read(PartialRolloutConfig, OmegaConf.select(OmegaConf.load(path), ROOT), ROOT)
    except (YAMLError, OmegaConfBaseException, ConfigError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}); move it away to plan with defaults"
        ) from error


def _curve(given: str | None, record: RunRecord | None) -> tuple[EngineCurve, str]:
    """Return the engine's curve, and its origin in words: from ``given`` (--curve), or else fitted to ``record``.

    Raises:
        ValueError: both are None, or the curve cannot be read or fitted.
    """
    if given is not None:
        curve = PRESETS.get(given) or EngineCurve.load(Path(given))
        return curve, f"ASSUMED ({given}), not measured: the forecast is as good as the assumption"
    if record is None:
        raise ValueError("no engine curve: give --run or --curve")
    # Without the first round of each process, in which the engine compiles.
    calls = CallColumns.joined(step.round.phase.calls for step in record.warm_steps)
    return fit(calls), f"fitted to the engine calls of {record.directory}"


def seconds_outside_rollout(record: RunRecord | None) -> float | None:
    """Return seconds outside rollout per trained token, over the run's ``warm_steps``.

    None without a record, or if no token was trained.
    """
    steps = record.warm_steps if record else []
    tokens = sum(group.tokens for step in steps for group in step.round.trained)
    return sum(step.seconds("step") - step.seconds("gen") for step in steps) / tokens if tokens else None


def plans_of(
    settings: PartialRolloutConfig,
    cluster: Cluster,
    lengths: LengthTrace,
    overlaps: Sequence[float],
    outside_s: float | None,
) -> list[Option]:
    """noPR, and PR at each of ``overlaps`` that the bound on staleness allows.

    Args:
        outside_s: seconds of a step outside rollout for each trained token.
    """
    base = forecast(baseline(settings), cluster, lengths)
    within = [overlap for overlap in sorted(overlaps) if overlap <= settings.max_staleness]
    made = [forecast(replace(settings, overlap=overlap), cluster, lengths) for overlap in within]
    return [
        Option.of(overlap, each, base, outside_s) for overlap, each in zip([0.0, *within], [base, *made], strict=True)
    ]


def _describe(cluster: Cluster, lengths: LengthTrace, source: str) -> str:
    curve = cluster.curve
    return (
        f"lengths: {lengths.groups.size:,} samples, mean {lengths.groups.mean():,.0f} tokens; "
        f"{cluster.replicas} x {cluster.slots_per_replica} slots\n"
        f"engine curve: {source}\n"
        f"  a step takes {curve.step_s * 1e3:.2f} ms + {curve.sample_s * 1e6:.0f} us a sample + "
        f"{curve.context_s * 1e9:.0f} ns a token of all contexts"
    )


# -- the table, and what it recommends ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """noPR, whose ``overlap`` is 0, or PR at an overlap. Times are for equal work, relative to noPR's."""

    overlap: float
    forecast: Forecast
    rollout: float
    step: float | None
    """time of a whole step, relative to noPR's; None if the time outside rollout is not known"""

    @classmethod
    def of(cls, overlap: float, forecast: Forecast, base: Forecast, outside_s: float | None) -> Self:
        """Make the option for ``forecast``, relative to noPR's forecast ``base``.

        Args:
            outside_s: seconds of a step outside rollout, per trained token; None if not known.
        """
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
            f"nothing to recommend: none of --overlaps is within max_staleness={bound} and {TESTED_OVERLAP:g}, the "
            "largest whose learning was tested"
        )
    enough = min(plan.time for plan in tested) / (1 - WORTH)
    found = next(plan for plan in tested if plan.time <= enough)
    what = "rollout" if found.step is None else "step"
    if not found.overlap:
        return f"recommended: noPR (partial_rollout.enable=False); PR saves less than {WORTH:.0%} of the {what} time"
    largest = "it is the largest of --overlaps whose learning was tested"
    why = largest if found is tested[-1] else f"a larger overlap saves less than {WORTH:.0%} of that"
    return (
        f"recommended: partial_rollout.overlap={found.overlap:g}, max_staleness={bound}: {found.time:.2f} of noPR's {what} "
        f"time; {why}. The price is a mean staleness of {found.forecast.staleness_mean:.2f}: the reward "
        "reaches noPR's values about as many steps later (once, not at each step). Let the learning rate decay if it "
        "is near the highest at which noPR is stable (docs/learning.md)"
    )
