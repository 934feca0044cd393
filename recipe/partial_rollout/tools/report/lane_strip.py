"""The strip below a run's panel in `timeline.png`: a lane for its engines, one for its trainer, a colour for each state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from recipe.partial_rollout.records.run_record import RunRecord
from recipe.partial_rollout.tools.report.lanes import Lanes, Trainer, lanes_of
from recipe.partial_rollout.tools.report.picture import HELD_COLOUR, IDLE_COLOUR, TRAINER_COLOURS
from recipe.partial_rollout.tools.report.spans import Span

LANE_HEIGHT = 0.45
"""Inches; a lane fills this part of its row."""
LEAST_PIXELS = 1.0
"""A hold is drawn at least this wide."""
FILLED = 0.8
"""Share of its row that a lane fills."""


@dataclass(frozen=True, slots=True)
class Strip:
    """The lanes of one run."""

    lanes: Lanes
    start: float
    """Unix seconds: 0 of the time axis."""
    end: float

    @property
    def height(self) -> float:
        """Inches."""
        return 2 * LANE_HEIGHT

    def draw(self, axes: Axes, colour: str, longest: float) -> None:
        """Draw it in `axes`, whose time axis is `longest` seconds long; `colour` is the run's."""
        self._draw_engines(axes, 1, colour, longest)
        self._draw_trainer(axes, 0)
        axes.set_ylim(-0.5, 1.5)
        axes.set_yticks([1, 0], ["engines", "trainer"])
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)

    def _draw_engines(self, axes: Axes, row: int, colour: str, longest: float) -> None:
        low = row - FILLED / 2
        self._fill(axes, row, [(self.start, self.end)], IDLE_COLOUR)
        times, share = self._decoding_share()
        top = low + FILLED * share
        axes.fill_between(times, low, top, step="post", color=colour, linewidth=0, antialiased=False, zorder=2)
        pixel = longest * LEAST_PIXELS / max(1.0, axes.get_window_extent().width)
        held = [(start, max(end - start, pixel)) for start, end in self._shifted(self.lanes.held)]
        axes.broken_barh(held, (low, FILLED), color=HELD_COLOUR, linewidth=0, antialiased=False, zorder=3)

    def _draw_trainer(self, axes: Axes, row: int) -> None:
        for state in Trainer:
            self._fill(axes, row, self.lanes.trainer[state], TRAINER_COLOURS[state])

    def _fill(self, axes: Axes, row: int, spans: list[Span], colour: str) -> None:
        bars = [(start, end - start) for start, end in self._shifted(spans)]
        axes.broken_barh(bars, (row - FILLED / 2, FILLED), color=colour, linewidth=0, antialiased=False, zorder=1)

    def _shifted(self, spans: list[Span]) -> list[Span]:
        """In seconds of the time axis."""
        return [(start - self.start, end - self.start) for start, end in spans]

    def _decoding_share(self) -> tuple[np.ndarray, np.ndarray]:
        """Share of the replicas that decode, from each moment to the next."""
        spans = [span for replica in self.lanes.decoding for span in self._shifted(replica)]
        edges = np.array([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans]).reshape(-1, 2)
        times, where = np.unique(edges[:, 0], return_inverse=True)
        changes = np.zeros(len(times))
        np.add.at(changes, where, edges[:, 1])
        return times, np.cumsum(changes) / len(self.lanes.decoding)


def strip_of(run: RunRecord, start: float, end: float) -> Strip | None:
    """The strip of `run` between two moments, in unix seconds; None if the run has no lanes of its own.

    Where engines and trainer take turns, the panel itself says who works.
    """
    return Strip(lanes_of(run).within(start, end), start, end) if run.settings.separate else None
