"""`timeline.png`: what every replica ran at each moment, one run below the other on one time axis.

Where a run has too many rounds to see each, `timeline_close.png` shows some from the middle.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from recipe.partial_rollout.records.run_record import RunRecord
from recipe.partial_rollout.records.running_curve import RunningCurve
from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.report.comparison import Comparison, Side
from recipe.partial_rollout.tools.report.concurrency import running_curve
from recipe.partial_rollout.tools.report.picture import DPI, hue
from recipe.partial_rollout.tools.report.summary import ratio, summarize

EMPTY_COLOUR, TRAIN_COLOUR, VALIDATE_COLOUR = "#FBF3D0", "#DCDCDC", "#C9B8D8"
MAX_ROUND_LABELS = 26
CLOSE_UP_ABOVE, CLOSE_UP_ROUNDS = 30, 10
"""A run of more than 30 rounds gets a close-up of 10."""

Span = tuple[float, float]
"""Start and length, in seconds from the first round's start."""


def draw_timeline(comparison: Comparison, title: str, path: Path) -> None:
    sides = comparison.sides
    figure = Figure(figsize=(14, 1 + 3.5 * len(sides)), dpi=DPI, layout="constrained")
    rows = figure.subplots(len(sides), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    longest = max(_duration(side.run) for side in sides)
    for index, (axes, side) in enumerate(zip(rows, sides, strict=True)):
        _draw_side(axes, side, hue(index))
        _label_rounds(axes, side.run, longest)
        _label_end(axes, side.run, longest)
    rows[0].set(xlim=(0, longest * 1.005), ylim=(0, None))
    lower = rows[-1]
    lower.set_xlabel(f"seconds from the start of round {comparison.base.run.rounds[0].step}")
    lower.xaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle(title, fontsize=14, fontweight="bold")
    _draw_legend(figure, comparison)
    figure.savefig(path)


def close_up(comparison: Comparison) -> Comparison | None:
    """The same comparison with a few rounds from the middle of every run; None where the runs are short."""
    rounds = min(len(side.run.rounds) for side in comparison.sides)
    if rounds <= CLOSE_UP_ABOVE:
        return None
    first = (rounds - CLOSE_UP_ROUNDS) // 2
    middle = slice(first, first + CLOSE_UP_ROUNDS)
    speed = comparison.full_speed
    others = tuple(
        dataclasses.replace(contrast, side=_cut(contrast.side, middle, speed)) for contrast in comparison.others
    )
    return dataclasses.replace(comparison, base=_cut(comparison.base, middle, speed), others=others)


def _cut(side: Side, rounds: slice, full_speed: float | None) -> Side:
    run = dataclasses.replace(side.run, steps=side.run.steps[rounds])
    return Side(side.name, run, summarize(run, full_speed))


def _draw_side(axes: Axes, side: Side, colour: str) -> None:
    settings, origin = side.run.settings, side.run.rounds[0].phase.start
    full, curve = settings.full_concurrency, _whole_curve(side.run)
    layers = np.vstack([np.zeros(len(curve.times)), np.cumsum(curve.running, axis=0)])
    training, validation = _between_rounds(side.run)
    whole_height = {"yrange": (0, 1), "transform": axes.get_xaxis_transform(), "linewidth": 0, "antialiased": False}
    axes.broken_barh(training, color=TRAIN_COLOUR, zorder=0, **whole_height)
    axes.broken_barh(validation, color=VALIDATE_COLOUR, zorder=0, **whole_height)
    rollouts = [(round_.phase.start - origin, round_.phase.seconds) for round_ in side.run.rounds]
    axes.broken_barh(rollouts, (0, full), color=EMPTY_COLOUR, linewidth=0, antialiased=False, zorder=0)
    style = {"step": "post", "linewidth": 0, "antialiased": False, "zorder": 2}
    for below, above, shade in zip(layers, layers[1:], _shades(colour, settings.replicas), strict=False):
        axes.fill_between(curve.times - origin, below, above, color=shade, **style)
    axes.plot([0, _duration(side.run)], [full, full], color="black", linestyle="--", linewidth=1.2, zorder=3)
    axes.set_ylabel("running samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_side_title(side), loc="left", fontsize=11, color=colour, fontweight="bold", pad=8)


def _side_title(side: Side) -> str:
    summary = side.summary
    return (
        f"{side.name}: rollout {units.seconds(summary.rollout_s)}, "
        f"{units.share(ratio(summary.rollout_s, summary.step_s))} of step time; "
        f"slots empty {units.share(summary.bubble_fraction)} of rollout; "
        f"{units.count(summary.decoded_tokens_per_s)} tokens/s"
    )


def _whole_curve(run: RunRecord) -> RunningCurve:
    """The rounds' curves one after another; every one ends at 0, so nothing runs between them."""
    curves = [running_curve(round_, run.settings.replicas) for round_ in run.rounds]
    return RunningCurve(
        np.concatenate([curve.times for curve in curves]), np.concatenate([curve.running for curve in curves], axis=1)
    )


def run_end(run: RunRecord) -> float:
    """Where training of the last step ends."""
    last = run.steps[-1]
    ends = [phase.end for phase in run.phases if phase.step == last.number]
    return max([*ends, last.round.phase.end + last.seconds("step") - last.seconds("gen")])


def _duration(run: RunRecord) -> float:
    """Seconds from the first round's start to the end of training."""
    return run_end(run) - run.rounds[0].phase.start


def _between_rounds(run: RunRecord) -> tuple[list[Span], list[Span]]:
    """Training: what lies between rounds. Validation: the part of it that the run traced as such."""
    origin, end = run.rounds[0].phase.start, run_end(run)
    next_starts = [*(round_.phase.start for round_ in run.rounds[1:]), end]
    training = [
        (round_.phase.end - origin, start - round_.phase.end)
        for round_, start in zip(run.rounds, next_starts, strict=True)
    ]
    validation = [
        (phase.start - origin, phase.end - phase.start)
        for phase in run.phases
        if phase.name == "validate" and origin <= phase.start <= end
    ]
    return training, validation


def _shades(colour: str, count: int) -> list[tuple[float, float, float]]:
    """The hue itself and lighter mixes of it, one a replica, neighbours well apart."""
    whites = [0.0] if count == 1 else [0.55 * index / (count - 1) for index in range(count)]
    red, green, blue = to_rgb(colour)
    return [(red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white) for white in whites]


def _label_rounds(axes: Axes, run: RunRecord, longest: float) -> None:
    """The number of every round above its middle, or of as many as fit."""
    origin = run.rounds[0].phase.start
    places: list[float] = []
    labels: list[str] = []
    for round_ in run.rounds:
        middle = (round_.phase.start + round_.phase.end) / 2 - origin
        if not places or middle - places[-1] >= longest / MAX_ROUND_LABELS:
            places.append(middle)
            labels.append(str(round_.step))
    top = axes.secondary_xaxis("top")
    top.set_xticks(places, labels, fontsize=8, color="#555555")
    top.tick_params(length=2, pad=1, color="#999999")
    top.spines["top"].set_visible(False)


def _label_end(axes: Axes, run: RunRecord, longest: float) -> None:
    """Says when the shorter run ended, where the picture leaves room."""
    if _duration(run) < 0.85 * longest:
        place = (_duration(run) + 0.008 * longest, 0.5)
        words = f"ends after {units.seconds(_duration(run))}"
        axes.text(*place, words, transform=axes.get_xaxis_transform(), fontsize=11, color="#555555", va="center")


def _draw_legend(figure: Figure, comparison: Comparison) -> None:
    handles: list[Any] = []
    labels: list[str] = []
    for index, side in enumerate(comparison.sides):
        replicas = side.run.settings.replicas
        handles.append(tuple(Patch(color=shade) for shade in _shades(hue(index), min(replicas, 6))))
        labels.append(f"running, {side.name}" + (f" (replicas 0 to {replicas - 1}, upwards)" if replicas > 1 else ""))
    fulls = sorted({side.run.settings.full_concurrency for side in comparison.sides})
    handles += [Line2D([], [], color="black", linestyle="--", linewidth=1.2), Patch(color=EMPTY_COLOUR)]
    labels += [f"full: {' and '.join(map(str, fulls))}", "rollout, slots empty"]
    handles.append(Patch(color=TRAIN_COLOUR))
    labels.append("training (between rounds)")
    if any(phase.name == "validate" for side in comparison.sides for phase in side.run.phases):
        handles.append(Patch(color=VALIDATE_COLOUR))
        labels.append("validation")
    handler = {tuple: HandlerTuple(ndivide=None, pad=0.0)}
    figure.legend(
        handles, labels, handler_map=handler, loc="outside lower center", ncols=min(6, len(labels)),
        frameon=False, fontsize=9, handlelength=2.4, columnspacing=1.4,
    )  # fmt: skip
