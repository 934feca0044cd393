"""Response lengths for a forecast: those of a run, or drawn from a distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from recipe.partial_rollout.records.run_record import RunRecord


@dataclass(frozen=True, slots=True)
class LengthTrace:
    """Groups of response lengths; the lengths of a group stay together because they are correlated."""

    groups: np.ndarray
    """int [groups, samples of a group], tokens"""
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if self.groups.ndim != 2 or not self.groups.size or self.groups.min() < 1:
            raise ValueError("a length trace is a table of at least one group, its lengths at least 1 token")

    @property
    def samples_per_group(self) -> int:
        return self.groups.shape[1]

    @property
    def mean(self) -> float:
        return float(self.groups.mean())

    @property
    def mean_context(self) -> float:
        """Mean context of a sample over its decoding steps, in tokens, if all samples decode without a pause."""
        return self.prompt_tokens + float((self.groups.astype(float) ** 2).sum() / (2 * self.groups.sum()))

    def replay(self) -> Iterator[np.ndarray]:
        """The groups in order, over and over."""
        while True:
            yield from self.groups

    def draw(self, seed: int) -> Iterator[np.ndarray]:
        """Groups drawn with replacement, for ever."""
        rng = np.random.default_rng(seed)
        while True:
            yield from self.groups[rng.integers(len(self.groups), size=256)]


def of_run(run: RunRecord) -> LengthTrace:
    """Lengths of the trained groups of ``run``, in dispatch order; prompts as long as its first ones."""
    groups = sorted(run.trained_groups, key=lambda group: group.order)
    calls = next((round_.phase.calls for round_ in run.rounds if round_.phase.calls), ())
    prompts = [call.context_tokens or 0 for call in calls if not call.resumed_tokens]
    return LengthTrace(
        np.maximum(1, np.array([group.lengths for group in groups])), round(float(np.median(prompts))) if prompts else 0
    )


def lognormal(
    *,
    median: float,
    mean: float,
    cap: int,
    samples_per_group: int,
    correlation: float = 0.5,
    groups: int = 4096,
    prompt_tokens: int = 0,
    seed: int = 0,
) -> LengthTrace:
    """Lognormal lengths cut off at ``cap``; ``correlation`` is that of the logarithms within a group.

    Raises:
        ValueError: the mean is not above the median: a lognormal distribution has a long right tail.
    """
    if not 0 < median < mean:
        raise ValueError(f"lognormal lengths need 0 < median < mean, not median {median:g} and mean {mean:g}")
    sigma = np.sqrt(2 * np.log(mean / median))
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((groups, 1)) * np.sqrt(correlation)
    own = rng.standard_normal((groups, samples_per_group)) * np.sqrt(1 - correlation)
    drawn = median * np.exp(sigma * (shared + own))
    return LengthTrace(np.clip(np.rint(drawn), 1, cap).astype(int), prompt_tokens)
