"""`report.png`: small panels, one figure a step for every run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipe.partial_rollout.tools.report.comparison import Comparison
from recipe.partial_rollout.tools.report.picture import DPI, hue
from recipe.partial_rollout.tools.report.summary import Summary

MARKED_STEPS = 40
"""Longer runs show a running mean, with every step's own value thin behind it."""
LENGTH_BINS = 40
SMOOTHED_SHARE = 12
"""The running mean spans about the run's number of steps divided by this."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    figures: Callable[[Summary], Sequence[float | None]]
    """Return a step's value for the run's line, and one for a second, thin line where there are two."""
    reach: float | None = 0.0
    """The axis includes 0 and at least this value; None if it follows the figures."""


PANELS = (
    Panel("decoded tokens/s in rollout (separate: in all)", lambda of: [of.decoded_tokens_per_s]),
    Panel("empty slots in rollout (separate: in all)", lambda of: [of.bubble_fraction], reach=1.0),
    Panel(
        "staleness of trained samples: mean, and max (thin)",
        lambda of: [of.staleness.mean, of.staleness.max] if of.staleness else [None],
        reach=1.0,
    ),
    Panel("mean reward", lambda of: [of.reward_last], reach=None),
    Panel("mean trained length, tokens", lambda of: [of.mean_trained_length]),
    Panel("entropy", lambda of: [of.run.steps[0].metrics.get("actor/entropy")], reach=None),
    Panel("sigma of trained lengths: batch, and group (thin)", lambda of: of.length_sigma or [None]),
    Panel("made by several versions: samples, and tokens (thin)", lambda of: of.mixed or [None]),
)


def draw_panels(comparison: Comparison, title: str, path: Path) -> None:
    figure = Figure(figsize=(14, 11.5), dpi=DPI, layout="constrained")
    grid = figure.subplots(3, 3)
    runs = [[Summary(replace(side.run, steps=[step])) for step in side.run.steps] for side in comparison.sides]
    *by_step, last = grid.flat
    for axes, panel in zip(by_step, PANELS, strict=True):
        axes.set_title(panel.title, fontsize=11, loc="left")
        _draw_panel(axes, panel, comparison, runs)
        axes.set_xlabel("step")
    _draw_lengths(last, comparison)
    figure.suptitle(title, fontsize=14, fontweight="bold", wrap=True)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=11)
    figure.savefig(path)


def _draw_lengths(axes: Axes, comparison: Comparison) -> None:
    """How the lengths of all trained responses are distributed, an outline a run."""
    lengths = [[length for group in side.run.trained_groups for length in group.lengths] for side in comparison.sides]
    edges = np.histogram_bin_edges(np.concatenate(lengths), LENGTH_BINS)
    for index, of_run in enumerate(lengths):
        shares = np.histogram(of_run, edges)[0] / max(1, len(of_run))
        axes.stairs(shares, edges, color=hue(index), linewidth=1.8)
    axes.set_title("lengths of all trained responses: share, by tokens", fontsize=11, loc="left")
    _plain(axes)
    axes.set_xlabel("response tokens")


def _plain(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6")
    axes.set_axisbelow(True)


def _draw_panel(axes: Axes, panel: Panel, comparison: Comparison, runs: list[list[Summary]]) -> None:
    drawn = False
    for index, (side, by_step) in enumerate(zip(comparison.sides, runs, strict=True)):
        numbers = np.array([step.number for step in side.run.steps])
        figures = [panel.figures(each) for each in by_step]
        for thin, column in enumerate(zip_longest(*figures)):
            values = np.array(column, float)
            known = ~np.isnan(values)
            steps, values = numbers[known], values[known]
            if thin:
                axes.plot(steps, values, color=hue(index), linewidth=1, alpha=0.55, drawstyle="steps-mid")
            else:
                _draw_series(axes, steps, values, label=side.name, colour=hue(index))
                drawn |= len(values) > 0
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _plain(axes)
    if not drawn:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color="#777777")
    elif panel.reach is not None:
        top = max(axes.get_ylim()[1], panel.reach)
        axes.set_ylim(-0.02 * top, top)


def _draw_series(axes: Axes, steps: np.ndarray, values: np.ndarray, *, label: str, colour: str) -> None:
    if len(values) <= MARKED_STEPS:
        axes.plot(steps, values, color=colour, label=label, linewidth=1.8, marker="o", markersize=4)
        return
    width = 2 * (len(values) // SMOOTHED_SHARE // 2) + 1
    smooth = pd.Series(values).rolling(width, center=True, min_periods=1).mean()
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(steps, smooth, color=colour, linewidth=2, label=f"{label} (mean of {width} steps)")
