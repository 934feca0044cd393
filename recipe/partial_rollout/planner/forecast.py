"""Forecasts: the long-run cost of rounds from a simulation, one row for each schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.cluster import Cluster
from recipe.partial_rollout.planner.lengths import LengthTrace
from recipe.partial_rollout.planner.simulation import SimulatedRound, Simulation
from recipe.partial_rollout.records.spread import spread

_FIRST = 5
"""first rounds whose lengths a forecast reports; later rounds have no bias"""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Figures of one schedule, over the rounds after the warm-up unless a field says otherwise."""

    round_s: float
    """mean"""
    trained_tokens_per_s: float
    efficiency: float
    """``trained_tokens_per_s`` over the tokens/s of replicas that a whole batch keeps full"""
    staleness_mean: float
    """versions, over trained samples"""
    staleness_p95: float
    staleness_max: int
    """versions, over all rounds"""
    token_age_mean: float
    """versions between a trained token's own and the one that trains it; long samples count with all their tokens"""
    off_policy_fraction: float
    """share of the trained tokens that older weights made"""
    first_length: float
    """mean length trained in the first rounds over that of as many groups in dispatch order"""


def forecast(
    admission: Admission,
    scheduling: Scheduling,
    cluster: Cluster,
    lengths: LengthTrace,
    *,
    rounds: int = 24,
    warmup: int | None = None,
) -> Forecast:
    """The forecast of ``rounds`` rounds after ``warmup`` ones, by default as many as the window takes to fill."""
    warmup = warmup_rounds(admission.overlap) if warmup is None else warmup
    simulation = Simulation(admission, scheduling, cluster, lengths)
    played = list(simulation.rounds(warmup + max(rounds, _FIRST)))
    first = np.concatenate([round_.lengths for round_ in played[:_FIRST]])
    dispatched = np.array(simulation.dispatched[: len(first)])
    full = cluster.full_tokens_per_s(admission.batch_groups * admission.samples_per_group, lengths.mean_context)
    return _summarize(played, warmup, float(first.mean() / dispatched.mean()), full)


def _summarize(
    played: Sequence[SimulatedRound],
    warmup: int,
    first_length: float,
    full_tokens_per_s: float,
) -> Forecast:
    """Summarize rounds; the first ``warmup`` count only for the largest staleness."""
    steady = played[warmup:]
    seconds, tokens = sum(r.seconds for r in steady), sum(r.trained_tokens for r in steady)
    staleness = spread(np.concatenate([r.staleness.ravel() for r in steady]))
    assert staleness is not None
    return Forecast(
        round_s=seconds / len(steady),
        trained_tokens_per_s=tokens / seconds,
        efficiency=tokens / seconds / full_tokens_per_s,
        staleness_mean=staleness.mean,
        staleness_p95=staleness.p95,
        staleness_max=max(int(r.staleness.max()) for r in played),
        token_age_mean=sum(r.token_ages for r in steady) / tokens,
        off_policy_fraction=1 - sum(r.on_policy_tokens for r in steady) / tokens,
        first_length=first_length,
    )


def warmup_rounds(overlap: float) -> int:
    """Number of first rounds that differ from the later ones."""
    return 2 + math.ceil(2 * overlap)


def baseline(admission: Admission) -> Admission:
    """noPR with the sizes of ``admission``: every round waits for its slowest sample."""
    return replace(admission, overlap=0.0, max_staleness=0)


def smallest_worthwhile(speeds: Sequence[tuple[float, float]], min_gain: float) -> float:
    """The smallest overlap whose next larger one gains too little to be worth its staleness; else the largest.

    Args:
        speeds: (overlap, tokens/s), ascending by overlap.
        min_gain: share of speed that the next larger overlap must gain.
    """
    for (overlap, speed), (_, faster) in itertools.pairwise(speeds):
        if faster < speed * (1 + min_gain):
            return overlap
    return speeds[-1][0]
