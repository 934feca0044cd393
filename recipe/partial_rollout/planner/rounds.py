"""Plays rounds of partial rollout, and forecasts their cost in the long run.

The real ``PromptsManager`` decides, a model of the engine decodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Segment
from recipe.partial_rollout.planner.engine_curve import Cluster
from recipe.partial_rollout.planner.replica_model import ReplicaModel
from recipe.partial_rollout.planner.samples import LengthTrace, PlayedSamples, TrainedBatch
from recipe.partial_rollout.records.figures import spread

_WORKER = "simulation"


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """One simulated rollout phase, and the batch that it trains."""

    seconds: float
    decoded_tokens: int
    batch: TrainedBatch


class Simulation:
    """Plays rounds, one after the other.

    Args:
        admission: mode and sizes, as the recipe's settings make them.
        lengths, seed, groups: see ``PlayedSamples``.

    Raises:
        ValueError: ``lengths`` has groups of another size than ``admission``.
    """

    def __init__(
        self,
        admission: Admission,
        scheduling: Scheduling,
        cluster: Cluster,
        lengths: LengthTrace,
        *,
        seed: int | None = 0,
        groups: int | None = None,
    ) -> None:
        self._cluster = cluster
        self._samples = PlayedSamples(lengths, admission.samples_per_group, seed=seed, groups=groups)
        self._manager = PromptsManager(admission, scheduling, clock=lambda: 0.0)
        self._manager.register_worker(_WORKER, cluster.slots_per_replica * cluster.replicas)
        self._version = 0

    @property
    def dispatched(self) -> list[np.ndarray]:
        """See ``PlayedSamples.dispatched``."""
        return self._samples.dispatched

    def rounds(self, count: int) -> Iterator[SimulatedRound]:
        """The next ``count`` rounds; fewer if the data runs out."""
        for _ in range(count):
            self._offer()
            if self._samples.all_trained:
                return
            self._manager.begin_version(self._version)
            yield self._round()

    def _offer(self) -> None:
        self._manager.offer(self._samples.prompts(self._manager.wanted))
        if self._samples.all_offered:
            self._manager.note_source(0)

    def _round(self) -> SimulatedRound:
        manager, now = self._manager, 0.0
        replicas = [ReplicaModel(self._cluster.curve) for _ in range(self._cluster.replicas)]
        self._samples.begin_version()
        self._claim(replicas, now)
        while not manager.round_complete():
            busy = min(replicas, key=ReplicaModel.next_end)
            for sample_id in busy.run_to_event():
                self._finish(sample_id)
            now = busy.clock
            manager.admit()
            self._claim(replicas, now)
        groups, version = manager.take_batch(stop=True), manager.version
        for replica in replicas:
            for decoding in replica.interrupt(now):
                # The step that the interruption completes may have made the last token.
                (self._interrupt if decoding.left else self._finish)(decoding.id)
        end = max(replica.clock for replica in replicas)
        decoded = self._samples.made_by_this_version()
        batch = self._samples.train(groups, version)
        manager.acknowledge([group.uid for group in groups])
        self._version += 1
        return SimulatedRound(end, decoded, batch)

    def _claim(self, replicas: list[ReplicaModel], now: float) -> None:
        """Claim samples; each starts at the replica that has the fewest."""
        for grant in self._manager.claim(_WORKER):
            replica = min(replicas, key=len)
            replica.advance(now)
            sample, resumed = self._samples.start(grant)
            replica.add(sample.engine, reads=not (resumed and self._cluster.keeps_kv))

    def _finish(self, sample_id: str) -> None:
        self._manager.finish(sample_id, self._samples.end(sample_id, self._manager.version))

    def _interrupt(self, sample_id: str) -> None:
        made = self._samples.note_made(sample_id, self._manager.version)
        zeros = np.broadcast_to(np.float32(0), made)
        self._manager.add_segment(sample_id, Segment(zeros.astype(np.int32), zeros, self._manager.version))
        self._manager.interrupt(sample_id)


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
    first = np.concatenate([round_.batch.lengths for round_ in played[:_FIRST]])
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
    seconds, tokens = sum(r.seconds for r in steady), sum(r.batch.tokens for r in steady)
    staleness = spread(np.concatenate([r.batch.staleness.ravel() for r in steady]))
    assert staleness is not None
    return Forecast(
        round_s=seconds / len(steady),
        trained_tokens_per_s=tokens / seconds,
        efficiency=tokens / seconds / full_tokens_per_s,
        staleness_mean=staleness.mean,
        staleness_p95=staleness.p95,
        staleness_max=max(int(r.batch.staleness.max()) for r in played),
        token_age_mean=sum(r.batch.token_ages for r in steady) / tokens,
        off_policy_fraction=1 - sum(r.batch.on_policy_tokens for r in steady) / tokens,
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
