"""The strip below a run's panel in `timeline.png`: lanes of engines and trainer, a colour for each state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes

from recipe.partial_rollout.tools.reading.columns import Span
from recipe.partial_rollout.tools.report.lanes import Lanes, Trainer, lanes_of
from recipe.partial_rollout.tools.report.picture import HELD_COLOUR, IDLE_COLOUR, TRAINER_COLOURS
from recipe.partial_rollout.tools.run_record import RunRecord

LANE_HEIGHT = 0.45
"""Inches, with the gap to the next."""
FILLED = 0.8
"""Share of this that a lane fills."""
LEAST_PIXELS = 1.0
"""A hold is drawn at least this wide."""


@dataclass(frozen=True, slots=True)
class Strip:
    """The lanes of one run."""

    NAMES: ClassVar = ("engines", "trainer")
    """Downwards."""
    HEIGHT: ClassVar = LANE_HEIGHT * len(NAMES)
    """Inches."""
    lanes: Lanes
    start: float
    """Unix seconds: 0 of the time axis."""
    end: float

    def draw(self, axes: Axes, colour: str, longest: float) -> None:
        """Draw it in `axes`, whose time axis is `longest` seconds long; `colour` is the run's."""
        self._draw_engines(axes, colour, longest)
        for state in Trainer:
            self._fill(axes, -1, self.lanes.trainer[state], TRAINER_COLOURS[state])
        axes.set_ylim(0.5 - len(self.NAMES), 0.5)
        axes.set_yticks([-row for row in range(len(self.NAMES))], self.NAMES)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)

    def _draw_engines(self, axes: Axes, colour: str, longest: float) -> None:
        """The share of the replicas that decode, as a height; holds across all of it."""
        self._fill(axes, 0, [(self.start, self.end)], IDLE_COLOUR)
        replicas = self.lanes.decoding
        edges = np.array(self._shifted(span for spans in replicas for span in spans)).reshape(-1, 2)
        times, where = np.unique(edges.T.ravel(), return_inverse=True)
        changes = np.bincount(where, np.repeat([1.0, -1.0], len(edges)), len(times))
        low = -FILLED / 2
        axes.fill_between(
            times, low, low + FILLED * np.cumsum(changes) / len(replicas),
            step="post", color=colour, linewidth=0, antialiased=False, zorder=2,
        )  # fmt: skip
        pixel = longest * LEAST_PIXELS / max(1.0, axes.get_window_extent().width)
        held = [(start, max(end - start, pixel)) for start, end in self._shifted(self.lanes.held)]
        axes.broken_barh(held, (low, FILLED), color=HELD_COLOUR, linewidth=0, antialiased=False, zorder=3)

    def _fill(self, axes: Axes, row: int, spans: list[Span], colour: str) -> None:
        bars = [(start, end - start) for start, end in self._shifted(spans)]
        axes.broken_barh(bars, (row - FILLED / 2, FILLED), color=colour, linewidth=0, antialiased=False, zorder=1)

    def _shifted(self, spans: Iterable[Span]) -> list[Span]:
        """In seconds of the time axis."""
        return [(start - self.start, end - self.start) for start, end in spans]


def strip_of(run: RunRecord, start: float, end: float) -> Strip | None:
    """The strip of `run` between two moments, in unix seconds; None where engines and trainer take turns.

    There the panel itself says who works.
    """
    return Strip(lanes_of(run).within(start, end), start, end) if run.settings.separate else None
