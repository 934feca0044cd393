"""Plays rounds of partial rollout: the real ``PromptsManager`` decides, a model of the engine decodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Grant, Segment
from recipe.partial_rollout.planner.cluster import Cluster
from recipe.partial_rollout.planner.lengths import LengthTrace
from recipe.partial_rollout.planner.played_samples import PlayedSample, PlayedSamples
from recipe.partial_rollout.planner.replica_model import ReplicaModel

_WORKER = "simulation"


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """One simulated rollout phase."""

    seconds: float
    decoded_tokens: int
    lengths: np.ndarray
    """int [trained groups, samples of a group], tokens"""
    staleness: np.ndarray
    """int [trained groups, samples of a group], versions since the first token of each"""
    on_policy_tokens: int
    """trained tokens that this round decoded"""
    token_ages: int
    """sum over the trained tokens of the versions between each token's own and the one that trains it"""

    @property
    def trained_tokens(self) -> int:
        return int(self.lengths.sum())


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
            self._manager.open_round()
            yield self._round()

    def _offer(self) -> None:
        self._manager.offer(self._samples.prompts(self._manager.wanted))
        if self._samples.all_offered:
            self._manager.close_source()

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
        manager.close_round()
        for replica in replicas:
            for decoding in replica.interrupt(now):
                # The step that the interruption completes may have made the last token.
                (self._interrupt if decoding.left else self._finish)(decoding.id)
        end = max(replica.clock for replica in replicas)
        return self._train(end, self._samples.made_by_this_version())

    def _claim(self, replicas: list[ReplicaModel], now: float) -> None:
        """Claim samples; each starts at the replica that has the fewest."""
        for grant in self._manager.claim(_WORKER):
            replica = min(replicas, key=len)
            replica.advance(now)
            sample, resumed = self._sample(grant)
            replica.add(sample.engine, reads=not (resumed and self._cluster.keeps_kv))

    def _sample(self, grant: Grant) -> tuple[PlayedSample, bool]:
        return self._samples.start(grant)

    def _finish(self, sample_id: str) -> None:
        self._manager.finish(sample_id, self._samples.end(sample_id, self._manager.version))

    def _interrupt(self, sample_id: str) -> None:
        made = self._samples.note_made(sample_id, self._manager.version)
        zeros = np.broadcast_to(np.float32(0), made)
        self._manager.add_segment(sample_id, Segment(zeros.astype(np.int32), zeros, self._manager.version))
        self._manager.interrupt(sample_id)

    def _train(self, seconds: float, decoded: int) -> SimulatedRound:
        manager, version = self._manager, self._manager.version
        groups = manager.take_batch()
        batch = self._samples.train(groups, version)
        manager.acknowledge([group.uid for group in groups])
        manager.advance_version(version + 1)
        return SimulatedRound(
            seconds, decoded, batch.lengths, batch.staleness, batch.on_policy_tokens, batch.token_ages
        )
