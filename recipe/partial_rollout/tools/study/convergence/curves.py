"""Validation curves of an arm over its seeds, and whether they end where the baseline's do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipe.partial_rollout.records.run_record import RunRecord
from recipe.partial_rollout.tools.study.held_out import held_out_rewards
from recipe.partial_rollout.tools.study.spread import standard_errors

LAST = 3
"""validations whose mean is a run's final reward: one alone is as noisy as the differences between arms"""


@dataclass(frozen=True, slots=True)
class ArmCurve:
    """One arm over its seeds (N of them, V validations)."""

    name: str
    seeds: int
    groups: np.ndarray
    """[V], groups trained so far"""
    rewards: np.ndarray
    """[N, V], mean validation reward"""
    staleness_mean: float
    """versions, over all trained samples"""
    staleness_max: int

    @property
    def finals(self) -> np.ndarray:
        """[N], the mean of the last validations of each seed."""
        return self.rewards[:, -LAST:].mean(axis=1)

    @property
    def final(self) -> float:
        return float(self.finals.mean())

    @property
    def final_error(self) -> float:
        """Standard error over seeds; NaN with one seed."""
        return standard_errors(self.finals[:, None])[0]

    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """[V], [V]: mean and standard error over seeds."""
        return self.rewards.mean(axis=0), np.nan_to_num(standard_errors(self.rewards))


def curve_of(name: str, runs: Sequence[RunRecord]) -> ArmCurve:
    """The arm's curve over its runs, as far as all of them have come.

    Raises:
        ValueError: there is no run, or one without a validation.
    """
    if not runs:
        raise ValueError(f"arm {name} has no run")
    validations = [_validations(run) for run in runs]
    count = min(len(found) for found in validations)
    if not count:
        raise ValueError(f"a run of arm {name} has no validation (trainer.test_freq)")
    rewards = [[reward for _, reward in found[:count]] for found in validations]
    groups = [trained for trained, _ in validations[0][:count]]
    staleness = [age for run in runs for step in run.steps for age in step.staleness]
    return ArmCurve(
        name=name,
        seeds=len(runs),
        groups=np.array(groups),
        rewards=np.array(rewards, dtype=float),
        staleness_mean=float(np.mean(staleness)) if staleness else 0.0,
        staleness_max=max(staleness, default=0),
    )


def _validations(run: RunRecord) -> list[tuple[int, float]]:
    """(groups trained so far, reward) of every validation."""
    found, trained = [], 0
    for step in run.steps:
        trained += len(step.round.trained)
        found += [(trained, reward) for reward in held_out_rewards([step.metrics])[:1]]
    return found


def gap(curve: ArmCurve, baseline: ArmCurve) -> tuple[float, float]:
    """Final reward minus the baseline's, and the standard error of the difference; NaN with one seed."""
    return curve.final - baseline.final, float(np.hypot(curve.final_error, baseline.final_error))
