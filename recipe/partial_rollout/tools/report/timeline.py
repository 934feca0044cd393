"""`timeline.png`: what every replica ran at each moment, one run below the other on one time axis."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from recipe.partial_rollout.records.figures import running_curve
from recipe.partial_rollout.records.run_log import RolloutPhase
from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.report.comparison import Comparison, Side
from recipe.partial_rollout.tools.report.lanes import Lanes, Trainer, lanes_of
from recipe.partial_rollout.tools.report.picture import DPI, hue
from recipe.partial_rollout.tools.run_record import RunRecord

PANEL_HEIGHT, LANE_HEIGHT = 3.5, 0.45
"""Inches."""
MAX_ROUND_LABELS = 26
IDLE_COLOUR, TRAIN_COLOUR, VALIDATE_COLOUR = "#FBF3D0", "#DCDCDC", "#C9B8D8"
HELD_COLOUR = "#1A1A1A"
TRAINER_COLOURS = {
    Trainer.WAIT: IDLE_COLOUR,
    Trainer.TRAIN: "#A8A8A8",
    Trainer.STAGE: "#7FB08A",
    Trainer.LOAD: HELD_COLOUR,
    Trainer.VALIDATE: VALIDATE_COLOUR,
}

Span = tuple[float, float]
"""Start and length, in seconds from the first round's start."""


def draw_timeline(comparison: Comparison, title: str, path: Path) -> None:
    """A panel a run; below that of a run with separate placement the trainer's lane."""
    sides = comparison.sides
    heights = [h for side in sides for h in (PANEL_HEIGHT, *([LANE_HEIGHT] if side.run.settings.separate else []))]
    figure = Figure(figsize=(14, 1 + sum(heights)), dpi=DPI, layout="constrained")
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(side.run.end - side.run.start for side in sides)
    places, panels = iter(rows), []
    for index, side in enumerate(sides):
        panels.append(axes := next(places))
        _draw_side(axes, side, hue(index))
        _label_rounds(axes, side.run)
        if side.run.settings.separate:
            lanes, origin = lanes_of(side.run), side.run.start
            _draw_holds(axes, lanes, origin, side.run.settings.full_concurrency)
            _draw_trainer(next(places), lanes, origin)
    tallest = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, tallest)
    rows[0].set_xlim(0, longest * 1.005)
    lower = rows[-1]
    lower.set_xlabel(f"seconds from the start of round {comparison.base.run.rounds[0].step}")
    lower.xaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle(title, fontsize=14, fontweight="bold")
    _draw_legend(figure)
    figure.savefig(path)


def _draw_side(axes: Axes, side: Side, colour: str) -> None:
    settings, origin = side.run.settings, side.run.start
    full, lanes = settings.full_concurrency, lanes_of(side.run)
    curve = running_curve(RolloutPhase(origin, side.run.rounds[-1].phase.end, side.run.calls), settings.replicas)
    if not settings.separate:
        at = axes.get_xaxis_transform()
        training, validation = lanes.spans(~lanes.trainer[Trainer.WAIT]), lanes.spans(lanes.trainer[Trainer.VALIDATE])
        _draw_bars(axes, _bars(training, origin), TRAIN_COLOUR, "training (between rounds)", zorder=0, transform=at)
        _draw_bars(axes, _bars(validation, origin), VALIDATE_COLOUR, str(Trainer.VALIDATE), zorder=0, transform=at)
    rollouts = [(round_.phase.start - origin, round_.phase.seconds) for round_ in side.run.rounds]
    empty = "slots empty, trainer waits" if settings.separate else "rollout, slots empty"
    _draw_bars(axes, rollouts, IDLE_COLOUR, empty, yrange=(0, full), zorder=0)
    style = {"step": "post", "linewidth": 0, "antialiased": False, "zorder": 2}
    which = f" (replicas 0 to {settings.replicas - 1}, upwards)" if settings.replicas > 1 else ""
    # The hue itself and lighter mixes of it, neighbours well apart.
    shades = LinearSegmentedColormap.from_list("", [colour, "white"])(np.linspace(0.0, 0.55, settings.replicas))
    labels = [f"running, {side.name}{which}"]
    axes.stackplot(curve.times - origin, curve.running, colors=shades, labels=labels, **style)
    line = {"color": "black", "linestyle": "--", "linewidth": 1.2, "zorder": 3}
    axes.plot([0, side.run.end - side.run.start], [full, full], label=f"full: {full}", **line)
    axes.set_ylabel("running samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_figures(side), loc="left", fontsize=11, color=colour, fontweight="bold", pad=8)


def _draw_holds(axes: Axes, lanes: Lanes, origin: float, full: int) -> None:
    """Over all that runs, which goes on but makes no token; the edge shows holds shorter than a pixel."""
    bars = _bars(lanes.spans(lanes.held), origin)
    _draw_bars(axes, bars, HELD_COLOUR, "engines held, weights load", yrange=(0, full), zorder=3, linewidth=0.7)


def _draw_trainer(axes: Axes, lanes: Lanes, origin: float) -> None:
    for state in Trainer:
        # Waiting and loading have the colours of empty slots and of holds, and their names.
        name = None if state in (Trainer.WAIT, Trainer.LOAD) else str(state)
        _draw_bars(axes, _bars(lanes.spans(lanes.trainer[state]), origin), TRAINER_COLOURS[state], name)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.5], ["trainer"])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_bars(
    axes: Axes, bars: list[Span], colour: str, name: str | None, yrange: tuple[float, float] = (0, 1), **style: Any
) -> None:
    """Under ``name`` in the legend, if there are any."""
    style = {"linewidth": 0, "antialiased": False, **style}
    axes.broken_barh(bars, yrange, color=colour, label=name if bars else None, **style)


def _bars(spans: Iterable[tuple[float, float]], origin: float) -> list[Span]:
    """From start and end in unix seconds."""
    return [(start - origin, end - start) for start, end in spans]


def _figures(side: Side) -> str:
    summary = side.summary
    return (
        f"{side.name}: slots empty {units.share(summary.bubble_fraction)} of "
        f"{'the run' if side.run.settings.separate else 'rollout'}; {units.count(summary.decoded_tokens_per_s)} tokens/s"
    )


def _label_rounds(axes: Axes, run: RunRecord) -> None:
    """The number of each round above its middle, or of every few if there are many."""
    shown = run.rounds[:: -(-len(run.rounds) // MAX_ROUND_LABELS)]
    middles = [(each.phase.start + each.phase.end) / 2 - run.start for each in shown]
    top = axes.secondary_xaxis("top")
    top.set_xticks(middles, [str(each.step) for each in shown], fontsize=8, color="#555555")
    top.tick_params(length=2, pad=1, color="#999999")
    top.spines["top"].set_visible(False)


def _draw_legend(figure: Figure) -> None:
    """What is drawn by name, once."""
    by_name: dict[str, Any] = {}
    for axes in figure.axes:
        for drawn, name in zip(*axes.get_legend_handles_labels(), strict=True):
            by_name.setdefault(name, drawn)
    figure.legend(
        list(by_name.values()), list(by_name), loc="outside lower center", ncols=min(5, len(by_name)),
        frameon=False, fontsize=9, handlelength=2.4, columnspacing=1.4,
    )  # fmt: skip
