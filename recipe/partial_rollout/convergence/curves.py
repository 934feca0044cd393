"""Reward curves of an arm over its seeds, and whether they end where the baseline's do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipe.partial_rollout.report.records import RunRecord

REWARD = "critic/score/mean"
LAST_SHARE = 10
"""A run's final reward is its mean over the last one in so many steps."""
WINDOW = 5
"""Steps of the running mean that is drawn."""


@dataclass(frozen=True, slots=True)
class ArmCurve:
    """One arm over its seeds (N of them, S steps)."""

    name: str
    seeds: int
    groups: np.ndarray
    """[S], groups trained so far"""
    rewards: np.ndarray
    """[N, S], mean reward of a step's samples"""
    staleness_mean: float
    """versions, over all trained samples"""
    staleness_max: int

    @property
    def finals(self) -> np.ndarray:
        """[N], the final reward of each seed."""
        last = max(1, self.rewards.shape[1] // LAST_SHARE)
        return self.rewards[:, -last:].mean(axis=1)

    @property
    def final(self) -> float:
        return float(self.finals.mean())

    @property
    def final_error(self) -> float:
        """Standard error over seeds; NaN with one seed."""
        return _standard_errors(self.finals[:, None])[0]

    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """[S], [S]: mean and standard error over seeds of the running mean over ``WINDOW`` steps."""
        width = min(WINDOW, self.rewards.shape[1])
        sums = np.cumsum(np.pad(self.rewards, ((0, 0), (1, 0))), axis=1)
        ends = np.arange(1, self.rewards.shape[1] + 1)
        starts = np.maximum(ends - width, 0)
        smooth = (sums[:, ends] - sums[:, starts]) / (ends - starts)
        return smooth.mean(axis=0), np.nan_to_num(_standard_errors(smooth))


def _standard_errors(values: np.ndarray) -> np.ndarray:
    """[S] over the seeds of [N, S]; NaN with one seed."""
    count = len(values)
    return values.std(axis=0, ddof=1) / np.sqrt(count) if count > 1 else np.full(values.shape[1], np.nan)


def curve_of(name: str, runs: Sequence[RunRecord]) -> ArmCurve:
    """The arm's curve over its runs, as far as all of them have come.

    Raises:
        ValueError: there is no run.
    """
    if not runs:
        raise ValueError(f"arm {name} has no run")
    steps = min(len(run.steps) for run in runs)
    rewards = [[step.metrics.get(REWARD, np.nan) for step in run.steps[:steps]] for run in runs]
    groups = np.cumsum([len(step.round.trained) for step in runs[0].steps[:steps]])
    staleness = [age for run in runs for step in run.steps for age in step.staleness]
    return ArmCurve(
        name=name,
        seeds=len(runs),
        groups=groups,
        rewards=np.array(rewards, dtype=float),
        staleness_mean=float(np.mean(staleness)) if staleness else 0.0,
        staleness_max=max(staleness, default=0),
    )


def gap(curve: ArmCurve, baseline: ArmCurve) -> tuple[float, float]:
    """Final reward minus the baseline's, and the standard error of the difference; NaN with one seed."""
    return curve.final - baseline.final, float(np.hypot(curve.final_error, baseline.final_error))
