"""An arm at a rate over its runs, each compared with the baseline's run from the same start with the same seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.studies.arm import BASELINE
from tests.studies.held_out import QUALITY
from tests.studies.learning.run import LearningRun
from tests.studies.spread import standard_errors

NEAR = 0.02
"""below the baseline's final reward, where a run counts as having got there too"""


@dataclass(frozen=True, slots=True)
class Gap:
    """Of an arm's figure from the baseline's, over pairs of runs."""

    mean: float
    error: float
    """standard error of the mean; NaN with one pair"""

    @property
    def within(self) -> bool | None:
        """Whether the arm is at most one standard error below the baseline; None: one pair does not tell."""
        return None if np.isnan(self.error) else self.mean >= -self.error


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm at one learning rate."""

    arm: str
    rate: float
    runs: tuple[LearningRun, ...]
    bases: tuple[LearningRun, ...]
    """[runs]: the baseline's run of the same rate, start and seed"""
    alone: tuple[LearningRun, ...] = ()
    """runs that have none; only whether they held counts"""

    @property
    def finals(self) -> np.ndarray:
        """[runs]"""
        return np.array([run.final for run in self.runs])

    @property
    def held(self) -> str:
        """How many of all runs have not fallen."""
        return f"{sum(not run.fell for run in self.every)} of {len(self.every)}"

    @property
    def every(self) -> tuple[LearningRun, ...]:
        """Runs with and without a pair."""
        return (*self.runs, *self.alone)

    def gap(self, figure: Callable[[LearningRun], float]) -> Gap:
        """Of ``figure``, within pairs."""
        gaps = np.array([figure(run) - figure(base) for run, base in self._pairs])
        return Gap(float(gaps.mean()), float(standard_errors(gaps[:, None])[0]))

    def ratio(self, figure: Callable[[LearningRun], float]) -> float:
        """Median over pairs."""
        return float(np.median([figure(run) / figure(base) for run, base in self._pairs]))

    @property
    def seconds_to_quality(self) -> float | None:
        """Median over runs; None where half of them never get there."""
        found = [run.seconds_to(QUALITY) for run in self.runs]
        median = float(np.median([np.inf if seconds is None else seconds for seconds in found]))
        return None if np.isinf(median) else median

    def time_ratios(self, level: Callable[[LearningRun], float]) -> list[float]:
        """Seconds to ``level`` of the baseline's run over the baseline's own, of each pair that gets there in both."""
        found = [(run.seconds_to(level(base)), base.seconds_to(level(base))) for run, base in self._pairs]
        return [ours / theirs for ours, theirs in found if ours is not None and theirs]

    @property
    def _pairs(self) -> list[tuple[LearningRun, LearningRun]]:
        return list(zip(self.runs, self.bases, strict=True))


def compare(runs: Sequence[LearningRun]) -> list[ArmFigures]:
    """Every arm at every rate and length that has a pair, in order of appearance."""
    bases = {(run.rate, run.steps, run.start, run.seed): run for run in runs if run.arm == BASELINE.name}
    found = []
    for arm, rate, steps in dict.fromkeys((run.arm, run.rate, run.steps) for run in runs):
        paired, alone = list[tuple[LearningRun, LearningRun]](), list[LearningRun]()
        for run in (run for run in runs if (run.arm, run.rate, run.steps) == (arm, rate, steps)):
            base = bases.get((rate, steps, run.start, run.seed))
            if base is not None:
                paired.append((run, base))
            else:
                alone.append(run)
        if paired:
            ours, theirs = zip(*paired, strict=True)
            found.append(ArmFigures(arm, rate, ours, theirs, tuple(alone)))
    return found
