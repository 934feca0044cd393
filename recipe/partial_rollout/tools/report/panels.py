"""`report.png`: small panels, one figure a step for every run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipe.partial_rollout.records.figures import bubble_fraction, length_sigmas
from recipe.partial_rollout.records.run_log import RunSettings
from recipe.partial_rollout.tools.report.comparison import Comparison
from recipe.partial_rollout.tools.report.picture import DPI, hue, mark
from recipe.partial_rollout.tools.report.summary import mean, ratio
from recipe.partial_rollout.tools.run_record import Step

MARKED_STEPS = 40
"""Longer runs show a running mean, with every step's own value thin behind it."""
LENGTH_BINS = 40
SMOOTHED_SHARE = 12
"""The running mean spans the number of steps over this."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A step of a run, as a panel needs it."""

    settings: RunSettings
    step: Step
    whole: bool
    """Whether figures of the engines are over whole steps, not over rollouts: one run's rollout has no end."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    """``{over}`` in it is for what the figures of the engines are over."""
    figures: Callable[[Shown], Sequence[float | None]]
    """Of each run's line, and of a second, thin one where there are two."""
    reach: float | None = 0.0
    """The axis includes 0 and at least this value; None if it follows the figures."""


def _seconds(shown: Shown) -> float:
    """Those that the figures of the engines are over."""
    if shown.settings.separate:
        return shown.step.decoding.seconds
    return shown.step.seconds("step" if shown.whole else "gen")


def _speed(shown: Shown) -> list[float | None]:
    return [ratio(shown.step.decoding.decoded_tokens, _seconds(shown))]


def _bubble(shown: Shown) -> list[float | None]:
    empty = bubble_fraction([shown.step.decoding], shown.settings.full_concurrency)
    if empty is not None and shown.whole and not shown.settings.separate:
        empty = 1 - (1 - empty) * (ratio(shown.step.seconds("gen"), shown.step.seconds("step")) or 0.0)
    return [empty]


PANELS = (
    Panel("decoded tokens/s {over}", _speed),
    Panel("empty slots {over} (bubble)", _bubble, reach=1.0),
    Panel(
        "staleness of trained samples: mean, and max (thin)",
        lambda shown: (mean(shown.step.staleness), max(shown.step.staleness, default=None)),
        reach=1.0,
    ),
    Panel("mean reward", lambda shown: [shown.step.metrics.get("critic/score/mean")], reach=None),
    Panel("mean trained length, tokens", lambda shown: [mean(shown.step.lengths)]),
    Panel("entropy", lambda shown: [shown.step.metrics.get("actor/entropy")], reach=None),
    Panel(
        "sigma of trained lengths: batch, and group (thin)",
        lambda shown: length_sigmas([group.lengths for group in shown.step.round.trained]),
    ),
    Panel("made by several versions: samples, and tokens (thin)", lambda shown: shown.step.mixed or [None]),
)


def draw_panels(comparison: Comparison, title: str, path: Path) -> None:
    figure = Figure(figsize=(14, 11.5), dpi=DPI, layout="constrained")
    grid = figure.subplots(3, 3)
    over = "over the whole step" if comparison.separate else "in rollout"
    runs = [
        [Shown(side.run.settings, step, comparison.separate) for step in side.run.steps] for side in comparison.sides
    ]
    *by_step, last = grid.flat
    for axes, panel in zip(by_step, PANELS, strict=True):
        axes.set_title(panel.title.format(over=over), fontsize=11, loc="left")
        _draw_panel(axes, panel, comparison, runs)
        axes.set_xlabel("step")
    _draw_lengths(last, comparison)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=11)
    figure.savefig(path)


def _draw_lengths(axes: Axes, comparison: Comparison) -> None:
    """How the lengths of all trained responses are distributed, an outline a run."""
    lengths = [[length for step in side.run.steps for length in step.lengths] for side in comparison.sides]
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


def _draw_panel(axes: Axes, panel: Panel, comparison: Comparison, runs: list[list[Shown]]) -> None:
    drawn = False
    for index, (side, shown) in enumerate(zip(comparison.sides, runs, strict=True)):
        numbers, figures = np.array([each.step.number for each in shown]), [panel.figures(each) for each in shown]
        for thin, column in enumerate(zip_longest(*figures)):
            values = np.array(column, float)
            known = ~np.isnan(values)
            steps, values = numbers[known], values[known]
            if thin:
                axes.plot(steps, values, color=hue(index), linewidth=1, alpha=0.55, drawstyle="steps-mid")
            else:
                _draw_series(axes, steps, values, label=side.name, colour=hue(index), marker=mark(index))
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


def _draw_series(axes: Axes, steps: np.ndarray, values: np.ndarray, *, label: str, colour: str, marker: str) -> None:
    if len(values) <= MARKED_STEPS:
        axes.plot(steps, values, color=colour, label=label, linewidth=1.8, marker=marker, markersize=4)
        return
    half = len(values) // SMOOTHED_SHARE // 2
    smooth = [values[max(0, at - half) : at + half + 1].mean() for at in range(len(values))]
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(steps, smooth, color=colour, linewidth=2, label=f"{label} (mean of {2 * half + 1} steps)")
