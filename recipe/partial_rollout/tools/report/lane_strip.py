"""The strip below a run's panel in `timeline.png`: lanes of engines, trainer and reward calls, a colour for each state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.axes import Axes

from recipe.partial_rollout.records.run_record import RunRecord
from recipe.partial_rollout.records.time_spans import Span, at_once, seconds
from recipe.partial_rollout.tools.report.lanes import Lanes, Trainer, lanes_of
from recipe.partial_rollout.tools.report.picture import HELD_COLOUR, IDLE_COLOUR, SCORING_COLOUR, TRAINER_COLOURS

LANE_HEIGHT = 0.45
"""Inches, with the gap to the next."""
FILLED = 0.8
"""Share of this that a lane fills."""
LEAST_PIXELS = 1.0
"""A hold is drawn at least this wide."""
LEAST_SCORING = 0.01
"""Reward calls have a lane if one takes this share of a step at least, in the mean."""


@dataclass(frozen=True, slots=True)
class Strip:
    """The lanes of one run."""

    lanes: Lanes | None
    """None: only reward calls are shown."""
    scorings: list[Span]
    """Empty: no reward calls are shown. They overlap."""
    start: float
    """Unix seconds: 0 of the time axis."""
    end: float

    @property
    def names(self) -> list[str]:
        """The lanes, downwards."""
        return [*(("engines", "trainer") if self.lanes else ()), *(("scoring",) if self.scorings else ())]

    @property
    def height(self) -> float:
        """Inches."""
        return LANE_HEIGHT * len(self.names)

    def draw(self, axes: Axes, colour: str, longest: float) -> None:
        """Draw it in `axes`, whose time axis is `longest` seconds long; `colour` is the run's."""
        for row, name in enumerate(self.names):
            low = -row - FILLED / 2
            if name == "engines" and self.lanes:
                self._draw_engines(axes, self.lanes, low, colour, longest)
            elif name == "trainer" and self.lanes:
                for state in Trainer:
                    self._fill(axes, low, self.lanes.trainer[state], TRAINER_COLOURS[state])
            else:
                self._draw_amount(axes, low, self.scorings, SCORING_COLOUR)
        axes.set_ylim(0.5 - len(self.names), 0.5)
        axes.set_yticks([-row for row in range(len(self.names))], self.names)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)

    def _draw_engines(self, axes: Axes, lanes: Lanes, low: float, colour: str, longest: float) -> None:
        """The share of the replicas that decode, as a height; holds across all of it."""
        self._fill(axes, low, [(self.start, self.end)], IDLE_COLOUR)
        self._draw_amount(axes, low, [span for spans in lanes.decoding for span in spans], colour, len(lanes.decoding))
        pixel = longest * LEAST_PIXELS / max(1.0, axes.get_window_extent().width)
        held = [(start, max(end - start, pixel)) for start, end in self._shifted(lanes.held)]
        axes.broken_barh(held, (low, FILLED), color=HELD_COLOUR, linewidth=0, antialiased=False, zorder=3)

    def _fill(self, axes: Axes, low: float, spans: list[Span], colour: str) -> None:
        bars = [(start, end - start) for start, end in self._shifted(spans)]
        axes.broken_barh(bars, (low, FILLED), color=colour, linewidth=0, antialiased=False, zorder=1)

    def _draw_amount(self, axes: Axes, low: float, spans: list[Span], colour: str, most: int | None = None) -> None:
        """How many of `spans` there are at each moment, as a height; `most` of them, or the most, fill a lane."""
        times, count = at_once(self._shifted(spans))
        top = low + FILLED * count / (most or max(1, count.max(initial=0)))
        axes.fill_between(times, low, top, step="post", color=colour, linewidth=0, antialiased=False, zorder=2)

    def _shifted(self, spans: Iterable[Span]) -> list[Span]:
        """In seconds of the time axis."""
        return [(start - self.start, end - self.start) for start, end in spans]


def strip_of(run: RunRecord, start: float, end: float) -> Strip | None:
    """The strip of `run` between two moments, in unix seconds; None if there is nothing that the panel does not say.

    Where engines and trainer take turns, the panel itself says who works.
    """
    calls = [span for round_ in run.rounds for span in round_.scorings]
    step_s = (end - start) / len(run.rounds)
    slow = bool(calls) and seconds(calls) / len(calls) >= LEAST_SCORING * step_s
    scorings = [(max(a, start), min(b, end)) for a, b in calls if slow and a < end and b > start]
    lanes = lanes_of(run).within(start, end) if run.settings.separate else None
    return Strip(lanes, scorings, start, end) if lanes or scorings else None
