"""Response lengths for a simulation: of a run, or drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from recipe.partial_rollout.tools.run_record import RunRecord

_MOST_WAITED = 0.05
"""largest ratio of the seconds between turns (tools) to the seconds of engine calls that a forecast may ignore"""


@dataclass(frozen=True, slots=True)
class LengthTrace:
    """Groups of response lengths; the lengths of a group stay together because they are correlated."""

    groups: np.ndarray
    """int [groups, samples of a group], tokens"""
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if self.groups.ndim != 2 or not self.groups.size or self.groups.min() < 1:
            raise ValueError(
                "no response lengths to plan with: give at least one trained group with lengths of at least 1 token"
            )

    @classmethod
    def of_run(cls, run: RunRecord) -> Self:
        """Take the numbers of generated tokens of the trained samples of ``run``, in dispatch order.

        ``prompt_tokens`` is the median prompt length of the samples of the run's first round.

        Raises:
            ValueError: its samples waited for tools, which the simulation does not model.
        """
        calls = run.calls
        _, left, back = calls.between_turns()
        waited, ran = float((back - left).sum()), float((calls.column("end") - calls.column("busy_from")).sum())
        if waited > _MOST_WAITED * ran:
            raise ValueError(
                f"{run.directory}: samples waited {waited:,.0f} s between turns and decoded {ran:,.0f} s; the simulation "
                "plays no tools, so compare short runs instead"
            )
        groups = sorted(run.trained_groups, key=lambda group: group.order)
        first = next((round_.phase.calls for round_ in run.rounds if round_.phase.calls), ())
        # The first call of each sample. A call that names no sample counts as one: the run's samples are single-turn.
        prompts = {call.sample or at: call.context_tokens for at, call in reversed(list(enumerate(first)))}
        # Tokens that tools wrote are part of a response, but no engine decodes them.
        generated = [np.array(group.lengths) * (group.tokens / max(1, sum(group.lengths))) for group in groups]
        lengths = np.maximum(1, np.rint(generated).astype(int))
        return cls(lengths, round(float(np.median(list(prompts.values())))) if prompts else 0)

    @classmethod
    def lognormal(
        cls,
        *,
        median: float,
        mean: float,
        cap: int,
        samples_per_group: int,
        groups: int = 4096,
    ) -> Self:
        """Lognormal lengths cut off at ``cap``; within a group their logarithms have a correlation of .5.

        Raises:
            ValueError: the mean is not above the median: a lognormal distribution has a long right tail.
        """
        if not 0 < median < mean:
            raise ValueError(f"lognormal lengths need 0 < median < mean, not median {median:g} and mean {mean:g}")
        sigma = np.sqrt(2 * np.log(mean / median))
        rng = np.random.default_rng(0)
        shared = rng.standard_normal((groups, 1)) * np.sqrt(0.5)
        own = rng.standard_normal((groups, samples_per_group)) * np.sqrt(0.5)
        drawn = median * np.exp(sigma * (shared + own))
        return cls(np.clip(np.rint(drawn), 1, cap).astype(int))
