"""Plays separate placement: trainer and engines have devices of their own, and both work at the same time.

The real ``PromptsManager`` decides, as in ``simulation``; models of both sides say how long things take::

    engines   |==decode=====================|hold|==decode=====================|hold|==
    trainer   |wait| log-probs, update |stage     |wait| log-probs, update |stage
                   ^ next_batch                  ^ next_version

Its round never ends: samples run through the weight updates, at which every engine stands still together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.planner.cluster import Cluster
from recipe.partial_rollout.planner.lengths import LengthTrace
from recipe.partial_rollout.planner.played_samples import PlayedSamples, TrainedBatch
from recipe.partial_rollout.planner.replica_model import ReplicaModel
from recipe.partial_rollout.planner.trainer_rate import WeightUpdate

_WORKER = "simulation"


@dataclass(frozen=True, slots=True)
class SeparateStep:
    """One version: from the moment that the engines decode with it until they decode with the next one."""

    seconds: float
    waiting_s: float
    """of them, in which the trainer waited for its batch"""
    held_s: float
    """in which a replica stood still for new weights, its samples waiting; mean over the replicas"""
    idle_s: float
    """in which a replica had no sample; mean over the replicas"""
    batch: TrainedBatch


class SeparateSimulation:
    """Plays versions, one after the other.

    Args:
        admission: mode and sizes; ``overlap`` counts the groups in flight while the trainer has its batch.
        cluster: the replicas that decode, all on devices of their own; ``keeps_kv`` also holds through a weight update.
        train_s: seconds that the trainer takes for a batch of so many tokens.
        update: what new weights cost.
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
        train_s: Callable[[int], float],
        update: WeightUpdate,
        *,
        seed: int | None = 0,
        groups: int | None = None,
    ) -> None:
        self._cluster = cluster
        self._train_s = train_s
        self._update = update
        self._samples = PlayedSamples(lengths, admission.samples_per_group, seed=seed, groups=groups)
        self._manager = PromptsManager(admission, scheduling, clock=lambda: 0.0)
        self._manager.register_worker(_WORKER, cluster.slots_per_replica * cluster.replicas)
        self._replicas = [ReplicaModel(cluster.curve) for _ in range(cluster.replicas)]
        self._now = 0.0
        self._idle_s = 0.0
        self._held_s = 0.0

    def steps(self, count: int) -> Iterator[SeparateStep]:
        """The next ``count`` versions; fewer if the data runs out."""
        for _ in range(count):
            if self._samples.all_trained:
                return
            if not self._manager.round_open:
                self._begin(self._manager.version)
            yield self._step()

    def _begin(self, version: int) -> None:
        self._manager.next_version(version, self._samples.prompts(self._manager.wanted))
        if self._samples.all_offered:
            self._manager.close_source()
        self._samples.begin_version()
        self._claim()

    def _step(self) -> SeparateStep:
        manager, began = self._manager, self._now
        self._idle_s = self._held_s = 0.0
        self._decode(math.inf)
        waited = self._now - began
        groups = manager.next_batch()
        batch = self._samples.train(groups, manager.version)
        updated = self._now + self._train_s(batch.tokens) + self._update.stage_s
        self._decode(updated)
        manager.acknowledge([group.uid for group in groups])
        self._hold(updated)
        self._begin(manager.version + 1)
        replicas = len(self._replicas)
        return SeparateStep(self._now - began, waited, self._held_s / replicas, self._idle_s / replicas, batch)

    # -- engines ---------------------------------------------------------------------------------------------------

    def _decode(self, until: float) -> None:
        """Decode until the clock is ``until``; if that is infinity, until the batch is complete."""
        waiting = math.isinf(until)
        while not (waiting and self._manager.round_complete()):
            busy = min(self._replicas, key=ReplicaModel.next_end)
            end = busy.next_end()
            if not waiting and end > until:
                self._now = until
                return
            assert end < math.inf, "no replica has a sample, and the batch is not complete"
            self._run_to_event(busy)
            self._now = max(self._now, busy.clock)
            self._manager.admit()
            self._claim()

    def _run_to_event(self, replica: ReplicaModel) -> None:
        for sample_id in replica.run_to_event():
            self._manager.finish(sample_id, self._samples.end(sample_id, self._manager.version))

    def _claim(self) -> None:
        """Claim samples; each starts at the replica that has the fewest."""
        for grant in self._manager.claim(_WORKER):
            replica = min(self._replicas, key=len)
            self._advance(replica, self._now)
            sample, resumed = self._samples.start(grant)
            assert not resumed, "nothing is interrupted"
            replica.add(sample.engine)

    def _advance(self, replica: ReplicaModel, clock: float) -> None:
        if not len(replica):
            self._idle_s += max(0.0, clock - replica.clock)
        replica.advance(clock)

    def _hold(self, at: float) -> None:
        """Every replica ends the step that it is in, and loads the weights once all have."""
        for replica in self._replicas:
            self._advance(replica, at)
            while replica.next_end() <= replica.clock:
                self._run_to_event(replica)
        self._now = max(replica.clock for replica in self._replicas) + self._update.hold_s
        for replica in self._replicas:
            if len(replica):
                self._held_s += self._now - replica.clock
            else:
                self._idle_s += self._now - replica.clock
            replica.hold(self._now, reads=not self._cluster.keeps_kv)
        self._samples.end_version(self._manager.version)
