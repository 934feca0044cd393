"""`timeline.png`: what every replica ran at each moment, one run below the other on one time axis."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from recipe.partial_rollout.records.metrics import running_curve
from recipe.partial_rollout.records.run_log import RolloutPhase
from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.report.comparison import Comparison, Side
from recipe.partial_rollout.tools.report.lanes import Bars, Lanes, Trainer, lanes_of
from recipe.partial_rollout.tools.report.picture import DPI, hue
from recipe.partial_rollout.tools.run_record import RunRecord

PANEL_HEIGHT, LANE_HEIGHT = 3.5, 0.45
"""Inches."""
MAX_ROUND_LABELS = 26
IDLE_COLOUR, HELD_COLOUR = "#FBF3D0", "#1A1A1A"
TRAINER_COLOURS = {
    Trainer.WAIT: IDLE_COLOUR,
    Trainer.TRAIN: "#A8A8A8",
    Trainer.STAGE: "#7FB08A",
    Trainer.LOAD: HELD_COLOUR,
    Trainer.VALIDATE: "#C9B8D8",
}


def draw_timeline(comparison: Comparison, title: str, path: Path) -> None:
    """A panel a run, and below it the trainer's lane."""
    sides = comparison.sides
    heights = [PANEL_HEIGHT, LANE_HEIGHT] * len(sides)
    figure = Figure(figsize=(14, 1 + sum(heights)), dpi=DPI, layout="constrained")
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    panels = rows[::2]
    for index, (side, panel, lane) in enumerate(zip(sides, panels, rows[1::2], strict=True)):
        lanes = lanes_of(side.run)
        _draw_engines(panel, side, lanes, hue(index))
        _draw_trainer(lane, lanes)
    tallest = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, tallest)
    rows[0].set_xlim(0, 1.005 * max(side.run.end - side.run.start for side in sides))
    lower = rows[-1]
    lower.set_xlabel(f"seconds from the start of round {comparison.base.run.rounds[0].step}")
    lower.xaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle(title, fontsize=14, fontweight="bold", wrap=True)
    _draw_legend(figure)
    figure.savefig(path)


def _draw_engines(axes: Axes, side: Side, lanes: Lanes, colour: str) -> None:
    settings, origin = side.run.settings, side.run.start
    full = settings.full_concurrency
    curve = running_curve(RolloutPhase(origin, side.run.rounds[-1].phase.end, side.run.calls), settings.replicas)
    rollouts = [(round_.phase.start - origin, round_.phase.seconds) for round_ in side.run.rounds]
    _draw_bars(axes, rollouts, IDLE_COLOUR, "slots empty", yrange=(0, full), zorder=0)
    style = {"step": "post", "linewidth": 0, "antialiased": False, "zorder": 2}
    which = f" (replicas 0 to {settings.replicas - 1}, upwards)" if settings.replicas > 1 else ""
    # The run's colour for replica 0, and lighter shades of it for the others.
    shades = LinearSegmentedColormap.from_list("", [colour, "white"])(np.linspace(0.0, 0.55, settings.replicas))
    labels = [f"running, {side.name}{which}"]
    axes.stackplot(curve.times - origin, curve.running, colors=shades, labels=labels, **style)
    # A line width above 0, so that a hold shorter than a pixel is visible.
    _draw_bars(
        axes, lanes.bars(lanes.held), HELD_COLOUR, "engines held", (0, full),
        zorder=3, linewidth=0.7,
    )  # fmt: skip
    line = {"color": "black", "linestyle": "--", "linewidth": 1.2, "zorder": 3}
    axes.plot([0, side.run.end - side.run.start], [full, full], label=f"full: {full}", **line)
    axes.set_ylabel("running samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_figures(side), loc="left", fontsize=11, color=colour, fontweight="bold", pad=16)
    _label_rounds(axes, side.run)


def _draw_trainer(axes: Axes, lanes: Lanes) -> None:
    for state in Trainer:
        _draw_bars(axes, lanes.bars(lanes.trainer[state]), TRAINER_COLOURS[state], str(state))
    axes.set_ylim(0, 1)
    axes.set_yticks([0.5], ["trainer"])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_bars(
    axes: Axes, bars: Bars, colour: str, name: str, yrange: tuple[float, float] = (0, 1), **style: Any
) -> None:
    """Draw bars; the legend lists ``name`` if there are any."""
    style = {"linewidth": 0, "antialiased": False, **style}
    axes.broken_barh(bars, yrange, color=colour, label=name if bars else None, **style)


def _figures(side: Side) -> str:
    summary = side.summary
    return (
        f"{side.name}: slots empty {units.share(summary.bubble_fraction)} of "
        f"{'the run' if side.run.settings.separate else 'rollout'}; {units.count(summary.decoded_tokens_per_s)} tokens/s"
    )


def _label_rounds(axes: Axes, run: RunRecord) -> None:
    """The number of each round above its middle, or of every few if there are many."""
    for round_ in run.rounds[:: -(-len(run.rounds) // MAX_ROUND_LABELS)]:
        middle = (round_.phase.start + round_.phase.end) / 2 - run.start
        style = {"ha": "center", "fontsize": 8, "color": "#555555"}
        axes.text(middle, 1.01, str(round_.step), transform=axes.get_xaxis_transform(), **style)


def _draw_legend(figure: Figure) -> None:
    """List each name that is drawn, once."""
    drawn = [axes.get_legend_handles_labels() for axes in figure.axes]
    by_name = {name: handle for handles, names in drawn for handle, name in zip(handles, names, strict=True)}
    figure.legend(
        list(by_name.values()), list(by_name), loc="outside lower center", ncols=min(5, len(by_name)),
        frameon=False, fontsize=9, handlelength=2.4, columnspacing=1.4,
    )  # fmt: skip
