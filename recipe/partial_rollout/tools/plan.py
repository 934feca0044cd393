"""Forecasts of policies and overlaps before anything runs, from response lengths and an engine curve.

Lengths and curve come from a run's own files (``--run``; a noPR run shows the engine under every load), or lengths from a
distribution and the curve from a preset. ``tests/studies/replay.py`` compares simulated times with measured ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, structs
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from yaml import YAMLError

from recipe.partial_rollout.config.keys import defaults_of
from recipe.partial_rollout.config.settings import PartialRolloutConfig, Scheduling, SchedulingPolicy
from recipe.partial_rollout.tools.command_line import Parser, typed
from recipe.partial_rollout.tools.plan_table import Option, advice, plan_table
from recipe.partial_rollout.tools.planner.engine_curve import PRESETS, Cluster, EngineCurve, fit
from recipe.partial_rollout.tools.planner.lengths import LengthTrace
from recipe.partial_rollout.tools.planner.rounds import baseline, forecast
from recipe.partial_rollout.tools.run_record import RunRecord, load_run

_LARGEST = sys.float_info.max
"""infinity is none"""
_Share: TypeAlias = Annotated[float, Meta(ge=0, le=_LARGEST)] | None
_MAX_STALENESS = defaults_of(PartialRolloutConfig)["max_staleness"]


def _of(kind: Any, allowed: str) -> Callable[[str], Any]:
    """The type of an option whose value is of ``kind``; ``allowed`` says what that is."""

    def convert(text: str) -> Any:
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError:
            raise argparse.ArgumentTypeError(f"{text}: {allowed}") from None

    return convert


def _at_least(least: int) -> Callable[[str], int]:
    return _of(Annotated[int, Meta(ge=least)], f"an integer of at least {least}")


def _parser() -> Parser:
    parser = Parser(
        typed("plan"),
        "Forecast the speed and staleness of scheduling policies and overlaps before anything runs.",
        [
            "--run outputs/quickstart/noPR --max-staleness 8",
            "--lognormal 3000 3600 18384 --curve h20-qwen3-4b --batch 64 --group 8 --replicas 8 --slots 64",
        ],
        "Response lengths and engine speed come from a finished run (--run; a noPR run shows the engine under every load), "
        "or from --lognormal and --curve. Exit code: 2 if input is missing.",
    )
    _add_inputs(parser)
    _add_schedules(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return parser


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    """Options that say what is forecast: lengths, engine and sizes."""
    parser.add_argument(
        "--run",
        dest="run_directory",
        type=Path,
        metavar="RUN",
        help="directory of a finished run: its lengths, engine curve and sizes, unless given otherwise",
    )
    parser.add_argument(
        "--lognormal",
        type=float,
        nargs=3,
        metavar=("MEDIAN", "MEAN", "CAP"),
        help="distribution of response lengths, in tokens",
    )
    parser.add_argument(
        "--curve",
        metavar="CURVE",
        help=f"engine speed: {' or '.join(PRESETS)} (assumed, not measured), or a JSON file of EngineCurve's fields",
    )
    parser.add_argument("--save-curve", type=Path, metavar="FILE", help="write the engine curve to this file")
    for name, least, means in (
        ("prompt-tokens", 0, "tokens of each prompt (default: those of --run, else 0)"),
        ("batch", 1, "groups that a step trains"),
        ("group", 1, "samples in a group"),
        ("replicas", 1, "engine replicas"),
        ("slots", 1, "samples that a replica runs at once"),
        ("max-staleness", 0, f"bound on staleness, in versions (default: that of --run, else {_MAX_STALENESS})"),
    ):
        parser.add_argument(f"--{name}", type=_at_least(least), metavar="N", help=means)


def _add_schedules(parser: argparse.ArgumentParser) -> None:
    """Options that say which schedules are forecast, for how long, and which is recommended."""
    parser.add_argument(
        "--overlaps",
        type=_of(Annotated[float, Meta(gt=0, le=_LARGEST)], "above 0"),
        nargs="+",
        default=[0.25, 0.5, 0.75, 1.0, 1.5, 2.0],
        metavar="X",
        help="values of partial_rollout.overlap to forecast",
    )
    parser.add_argument(
        "--policies",
        type=SchedulingPolicy,
        nargs="+",
        default=list(SchedulingPolicy),
        metavar="POLICY",
        help="values of partial_rollout.scheduling.policy to forecast",
    )
    parser.add_argument(
        "--overtake",
        type=_of(_Share, "at least 0, or null"),
        nargs="+",
        metavar="SHARE",
        help="values of partial_rollout.scheduling.overtake to forecast (default: null, no limit)",
    )
    parser.add_argument("--keep-kv", action="store_true", help="assume partial_rollout.resume_kv=keep")
    parser.add_argument(
        "--rounds",
        type=_at_least(1),
        default=24,
        metavar="N",
        help="rounds of each forecast; the last two columns need some 200 (relative error 1 / sqrt(2 N))",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; exit code 2 if input is missing."""
    options = _parser().parse_args(arguments)
    try:
        _plan(options)
    except (ValueError, OverflowError, OSError) as error:
        print(f"error: {error}")
        return 2
    return 0


def _plan(options: argparse.Namespace) -> None:
    record = load_run(options.run_directory) if options.run_directory else None
    lengths, settings = _inputs(options, record)
    curve, source = _curve(options.curve, record)
    if options.save_curve:
        options.save_curve.write_bytes(msgspec.json.format(msgspec.json.encode(curve)))
    replicas = _size(options, record, "replicas", "replicas")
    slots = _size(options, record, "slots", "slots_per_replica")
    cluster = Cluster(curve, replicas, slots, keeps_kv=options.keep_kv)
    base = forecast(baseline(settings), cluster, lengths, rounds=options.rounds)
    plans = [Option("noPR", 0.0, None, base), *_options(options, settings, cluster, lengths)]
    print(_describe(cluster, lengths))
    print(plan_table(plans).console())
    print(f"\n{advice(plans, settings.max_staleness)}\n\nengine curve: {source}")
    if options.json:
        figures = {"curve": structs.asdict(curve), "plans": [asdict(plan) for plan in plans]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _inputs(options: argparse.Namespace, record: RunRecord | None) -> tuple[LengthTrace, PartialRolloutConfig]:
    n = _size(options, record, "group", "samples_per_group")
    if options.lognormal:
        median, mean, cap = options.lognormal
        lengths = LengthTrace.lognormal(median=median, mean=mean, cap=int(cap), samples_per_group=n)
    elif record:
        lengths = LengthTrace.of_run(record)
    else:
        raise ValueError("no lengths: give --run or --lognormal")
    if options.prompt_tokens is not None:
        lengths = replace(lengths, prompt_tokens=options.prompt_tokens)
    batch = _size(options, record, "batch", "batch_groups")
    bound = options.max_staleness if options.max_staleness is not None else _bound_of(record)
    return lengths, PartialRolloutConfig(batch_groups=batch, samples_per_group=n, overlap=0.0, max_staleness=bound)


def _size(options: argparse.Namespace, record: RunRecord | None, option: str, setting: str) -> int:
    """What the option says, or else the run's setting."""
    given = getattr(options, option)
    if given is not None:
        return given
    if record is None:
        raise ValueError(f"--{option} is missing: give it, or --run")
    return getattr(record.settings, setting)


def _bound_of(record: RunRecord | None) -> int:
    """The run's bound on staleness; a run without partial rollout has it only in its configuration."""
    path = Path(record.directory) / "config.yaml" if record else None
    if path is None or not path.exists():
        return _MAX_STALENESS
    try:
        found = OmegaConf.select(OmegaConf.load(path), "partial_rollout.max_staleness")
        return _MAX_STALENESS if found is None else int(found)
    except (YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}): give --max-staleness") from error


def _curve(given: str | None, record: RunRecord | None) -> tuple[EngineCurve, str]:
    """The curve, and where it comes from."""
    if given in PRESETS:
        return PRESETS[given], f"ASSUMED (preset {given}); a noPR run's (--run) is measured"
    if given is not None:
        return EngineCurve.load(Path(given)), given
    if record is None:
        raise ValueError("no engine curve: give --run or --curve")
    return fit(record.calls), "fitted to the calls of --run"


def _options(
    options: argparse.Namespace, settings: PartialRolloutConfig, cluster: Cluster, lengths: LengthTrace
) -> Iterator[Option]:
    overlaps = [overlap for overlap in sorted(options.overlaps) if overlap <= settings.max_staleness]
    schedules = [Scheduling(policy, overtake) for policy in options.policies for overtake in options.overtake or [None]]
    for scheduling in tqdm(schedules, desc="forecasts", leave=False):
        for overlap in overlaps:
            sized = replace(settings, overlap=overlap, scheduling=scheduling)
            made = forecast(sized, cluster, lengths, rounds=options.rounds)
            yield Option(str(scheduling.policy), overlap, scheduling.overtake, made)


def _describe(cluster: Cluster, lengths: LengthTrace) -> str:
    curve = cluster.curve
    load = min(cluster.slots_per_replica, 128)
    return (
        f"lengths: {lengths.groups.size:,} samples, mean {lengths.groups.mean():,.0f} tokens; engine: a step of "
        f"{curve.step_s * 1e3:.2f} ms + {curve.sample_s * 1e6:.0f} us a sample + {curve.context_s * 1e9:.0f} ns a token of "
        f"context ({load / curve.decode_s(load, 0):,.0f} tokens/s at {load} with short ones), "
        f"{cluster.replicas} x {cluster.slots_per_replica} slots\n"
    )
