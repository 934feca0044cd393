"""Plays rounds of colocated partial rollout, and forecasts their cost in the long run.

The real ``PromptsManager`` decides, a model of the engine decodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from recipe.partial_rollout.config.settings import Mode, PartialRolloutConfig, Scheduling
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Progress, Segment
from recipe.partial_rollout.records.figures import spread
from recipe.partial_rollout.tools.planner.engine_curve import Cluster
from recipe.partial_rollout.tools.planner.replica_model import ReplicaModel
from recipe.partial_rollout.tools.planner.samples import LengthTrace, PlayedSamples, TrainedBatch

_WORKER = "simulation"


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """A rollout phase and the batch that it trains."""

    seconds: float
    batch: TrainedBatch


class Simulation:
    """Plays rounds, one after the other.

    Args:
        settings: mode, sizes and scheduling are played; dynamic sampling is not.
        lengths, seed, groups: see ``PlayedSamples``.

    Raises:
        ValueError: ``lengths`` has groups of another size than ``settings``.
    """

    def __init__(
        self,
        settings: PartialRolloutConfig,
        cluster: Cluster,
        lengths: LengthTrace,
        *,
        seed: int | None = 0,
        groups: int | None = None,
    ) -> None:
        self._cluster = cluster
        self.samples = PlayedSamples(lengths, settings.samples_per_group, seed=seed, groups=groups)
        self._manager = PromptsManager(replace(settings, group_filter=None), clock=lambda: 0.0)
        self._manager.slots.register(_WORKER, cluster.slots_per_replica * cluster.replicas)
        self._version = 0
        self._now = 0.0

    def rounds(self, count: int) -> Iterator[SimulatedRound]:
        """The next ``count`` rounds; fewer if the data runs out."""
        for _ in range(count):
            if self.samples.all_trained:
                return
            yield self._round()

    def _round(self) -> SimulatedRound:
        self._replicas = [ReplicaModel(self._cluster.curve) for _ in range(self._cluster.replicas)]
        # The clock starts again with each round.
        self._now = 0.0
        self._begin()
        self._decode()
        groups, version = self._manager.take_batch(stop=True), self._manager.version
        self._interrupt_all()
        batch = self.samples.train(groups, version)
        self._manager.groups.train([group.uid for group in groups])
        self._version += 1
        return SimulatedRound(self._now, batch)

    def _begin(self) -> None:
        prompts = self.samples.prompts(self._manager.wanted)
        self._manager.reserve.offer(prompts, 0 if self.samples.all_offered else math.inf)
        self._manager.begin_version(self._version)
        self._claim()

    def _decode(self) -> None:
        """Decode until the batch is complete."""
        while not self._manager.round_complete():
            busy = min(self._replicas, key=ReplicaModel.next_end)
            assert busy.next_end() < math.inf, "no sample is in a replica, and the batch is not complete"
            for sample_id in busy.run_to_event():
                self._finish(sample_id)
            self._now = busy.clock
            self._manager.admit()
            self._claim()

    def _finish(self, sample_id: str) -> None:
        self._manager.finish(sample_id, self.samples.end(sample_id, self._manager.version))

    def _claim(self) -> None:
        """Start what is granted, each sample at the replica that has the fewest."""
        for grant in self._manager.claim(_WORKER):
            sample, resumed = self.samples.start(grant)
            replica = min(self._replicas, key=len)
            replica.advance(self._now)
            replica.add(sample.engine, reads=not (resumed and self._cluster.keeps_kv))

    def _interrupt_all(self) -> None:
        for replica in self._replicas:
            for decoding in replica.interrupt(self._now):
                if decoding.left:
                    self._interrupt(decoding.id)
                else:
                    # The step that the interruption completes has made the last token.
                    self._finish(decoding.id)
        self.samples.end_version(self._manager.version)
        self._now = max(replica.clock for replica in self._replicas)

    def _interrupt(self, sample_id: str) -> None:
        zeros = np.broadcast_to(np.float32(0), self.samples.live[sample_id].made_now)
        segment = Segment(zeros.astype(np.int32), zeros, self._manager.version)
        self._manager.add(Progress(sample_id, [segment]))
        self._manager.interrupt(sample_id)


_FIRST = 5
"""first rounds whose lengths a forecast reports; later rounds have no bias"""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Figures of one schedule, over the rounds after those that fill the window unless a field says otherwise."""

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
    settings: PartialRolloutConfig,
    cluster: Cluster,
    lengths: LengthTrace,
    *,
    rounds: int = 24,
) -> Forecast:
    """The forecast of ``rounds`` rounds after those in which the window fills."""
    filling = 2 + math.ceil(2 * settings.overlap)
    simulation = Simulation(settings, cluster, lengths)
    played = list(simulation.rounds(filling + max(rounds, _FIRST)))
    first = np.concatenate([round_.batch.lengths for round_ in played[:_FIRST]])
    steady = played[filling:]
    seconds, tokens = sum(r.seconds for r in steady), sum(r.batch.tokens for r in steady)
    staleness = spread(np.concatenate([r.batch.staleness.ravel() for r in steady]))
    assert staleness is not None
    return Forecast(
        round_s=seconds / len(steady),
        trained_tokens_per_s=tokens / seconds,
        efficiency=tokens / seconds / cluster.full_tokens_per_s(settings.batch_samples, lengths.mean_context),
        staleness_mean=staleness.mean,
        staleness_p95=staleness.p95,
        staleness_max=max(int(r.batch.staleness.max()) for r in played),
        token_age_mean=sum(r.batch.token_ages for r in steady) / tokens,
        off_policy_fraction=1 - sum(r.batch.on_policy_tokens for r in steady) / tokens,
        first_length=float(first.mean() / np.array(simulation.samples.dispatched[: len(first)]).mean()),
    )


def baseline(settings: PartialRolloutConfig) -> PartialRolloutConfig:
    """noPR with the sizes of ``settings``: every round waits for its slowest sample."""
    return replace(settings, mode=Mode.WINDOW, overlap=0.0, max_staleness=0, scheduling=Scheduling())


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
