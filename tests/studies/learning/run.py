"""What one run learnt and what it cost, small enough to commit: one line of the study's ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from recipe.partial_rollout.records.metrics import held_out_rewards
from recipe.partial_rollout.tools.reading.run_log import RunRecordError
from recipe.partial_rollout.tools.run_record import StepMetrics, read_metrics
from recipe.partial_rollout.training.step_log import KL, PolicyDrift
from tests.studies.held_out import WARM_UP, seconds_to

LAST = 3
"""validations whose mean is a run's final reward: one alone is as noisy as the differences between arms"""
FALL = 0.05
"""a run that falls so far (``LearningRun.fall``) has not held, even if it recovers"""
_STALENESS = ("partial_rollout/staleness", "training/off_policy/trajectory_staleness_worst")
"""the recipe's and verl's name for the same"""
SERIES = {
    "rollout_s": ("timing_s/gen",),
    "step_s": ("timing_s/step",),
    "length": ("response_length/mean",),
    "reward": ("critic/score/mean",),
    "staleness": tuple(f"{name}/mean" for name in _STALENESS),
    "staleness_max": tuple(f"{name}/max" for name in _STALENESS),
    "kl": ("rollout_corr/kl",),
    "k3_kl": ("rollout_corr/k3_kl",),
    "grad_norm": ("actor/grad_norm",),
    "ess": ("rollout_corr/rollout_is_eff_sample_size", "partial_rollout/behaviour_weight/ess"),
    "masked": ("partial_rollout/trust_region/masked",),
}
"""by name: verl's or the recipe's metric of a step, whichever the trainer logs"""


@dataclass(frozen=True, slots=True)
class LearningRun:
    """One complete run."""

    arm: str
    """without the learning rate"""
    rate: float
    """learning rate"""
    start: int
    """``--seed`` of the warm start"""
    seed: int
    """of the data's order and the engine's sampling"""
    overrides: tuple[str, ...]
    """hydra's, sorted, without those that name paths or the run"""
    task: str
    """fingerprint of the warm start's code"""
    commit: str
    validated_at: tuple[int, ...]
    """[V]: steps"""
    held_out: tuple[float, ...]
    """[V]: mean reward on held-out prompts under the weights after that step"""
    series: dict[str, tuple[float, ...]]
    """[steps] each, by the names of ``SERIES``; empty: not logged"""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two runs that differ by chance alone."""
        return (self.arm, self.rate, self.start, self.seed, self.task, self.overrides)

    @property
    def steps(self) -> int:
        return len(self.series["step_s"])

    @property
    def final(self) -> float:
        """Mean of the last ``LAST`` validations."""
        return float(np.mean(self.held_out[-LAST:]))

    @property
    def fall(self) -> float:
        """Deepest fall of the mean of ``LAST`` validations in a row below the best one before it."""
        means = np.convolve(self.held_out, np.full(LAST, 1 / LAST), mode="valid")
        return float((np.maximum.accumulate(means) - means).max())

    @property
    def falls_at(self) -> int | None:
        """Step of the first validation ``FALL`` below the best before it; None: the run has held."""
        if not self.fell:
            return None
        lost = np.maximum.accumulate(self.held_out) - self.held_out
        return next(step for step, loss in zip(self.validated_at, lost, strict=True) if loss >= FALL)

    @property
    def fell(self) -> bool:
        """Whether the run has not held."""
        return self.fall >= FALL

    @property
    def warned_at(self) -> int | None:
        """First step in which the recipe warns of drift; None: none."""
        drift = PolicyDrift()
        return next((step for step, k3 in enumerate(self.series["k3_kl"], 1) if drift.observe({KL: k3}, step)), None)

    @property
    def ess_at_warning(self) -> float | None:
        """Effective sample size, 0 to 1, in the step of the warning; None: no warning, or not logged in every step."""
        ess = self.series["ess"]
        return ess[self.warned_at - 1] if self.warned_at and len(ess) == self.steps else None

    def seconds_to(self, level: float) -> float | None:
        """See ``held_out.seconds_to``."""
        return seconds_to(level, self.validated_at, self.held_out, self.series["step_s"])

    @property
    def rollout_per_token(self) -> float:
        """Rollout seconds over trained response tokens after the warm-up, up to a factor that equal batches share."""
        return sum(self.series["rollout_s"][WARM_UP:]) / sum(self.series["length"][WARM_UP:])

    @property
    def step_per_token(self) -> float:
        """Seconds of whole steps over trained response tokens after the warm-up, up to the same factor."""
        return sum(self.series["step_s"][WARM_UP:]) / sum(self.series["length"][WARM_UP:])

    @property
    def staleness_mean(self) -> float:
        """Versions, over trained samples; 0 where none is logged."""
        return float(np.mean(self.series["staleness"])) if self.series["staleness"] else 0.0

    @property
    def staleness_max(self) -> float:
        return max(self.series["staleness_max"], default=0.0)

    @property
    def largest_k3(self) -> float:
        """Of all steps, in nats a token; 0 where none is logged."""
        return max((abs(k3) for k3 in self.series["k3_kl"]), default=0.0)

    @property
    def length_variation(self) -> float:
        """Standard deviation over mean of the batches' mean response length."""
        lengths = np.array(self.series["length"])
        return float(lengths.std(ddof=1) / lengths.mean())

    @classmethod
    def from_json(cls, place: str, values: dict[str, Any]) -> Self:
        """The inverse of ``to_json``; ``place`` is where its line stands.

        Raises:
            RunRecordError: a field is missing.
        """
        try:
            return cls(
                **{
                    **values,
                    "overrides": tuple(values["overrides"]),
                    "validated_at": tuple(values["validated_at"]),
                    "held_out": tuple(values["held_out"]),
                    "series": {name: tuple(values["series"].get(name, ())) for name in SERIES},
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise RunRecordError(f"{place}: no run of a learning study: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """As one line of the ledger; numbers to four digits."""
        values = asdict(self)
        values["series"] = {name: _rounded(series) for name, series in self.series.items() if series}
        values["held_out"] = _rounded(self.held_out)
        return values


def read_run(directory: Path, **known: Any) -> LearningRun:
    """The run in ``directory``, from ``metrics.jsonl`` alone; ``known`` are the fields that it does not tell.

    Raises:
        RunRecordError: the file cannot be read, or the run was never validated.
    """
    path = directory / "metrics.jsonl"
    steps = [line for line in read_metrics(path, []) if "training/global_step" in line.values]
    validated = [(step.step, rewards[0]) for step in steps if (rewards := held_out_rewards([step.values]))]
    if not validated:
        raise RunRecordError(f"{path}: no validation (trainer.test_freq)")
    return LearningRun(
        **known,
        validated_at=tuple(step for step, _ in validated),
        held_out=tuple(reward for _, reward in validated),
        series={name: _series(steps, keys) for name, keys in SERIES.items()},
    )


def _series(steps: Sequence[StepMetrics], keys: Sequence[str]) -> tuple[float, ...]:
    """The first of ``keys`` that every step has; empty: none."""
    for key in keys:
        if all(key in step.values for step in steps):
            return tuple(step.values[key] for step in steps)
    return ()


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
