"""Plays separate placement: trainer and engines have devices of their own, and both work at the same time.

The real ``PromptsManager`` decides, as in ``simulation``; models of both sides say how long things take::

    engines   |==decode=====================|hold|==decode=====================|hold|==
    trainer   |wait| log-probs, update |stage     |wait| log-probs, update |stage
                   ^ take_batch                  ^ begin_version

Its round never ends: samples run through the weight updates, at which every engine stands still together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.planner.engine_curve import Cluster
from recipe.partial_rollout.planner.replica_model import ReplicaModel
from recipe.partial_rollout.planner.samples import LengthTrace, PlayedSamples, TrainedBatch


@dataclass(frozen=True, slots=True)
class TrainerRate:
    """A batch takes ``fixed_s``, and ``token_s`` a trained token on one device; more devices share the tokens."""

    fixed_s: float
    """seconds that more devices do not shorten"""
    token_s: float
    """seconds of one device for a trained token: log-probs, forward, backward, update"""

    @classmethod
    def measured(cls, train_s: float, fixed_s: float, tokens: float, devices: int) -> TrainerRate:
        """The rate at which ``devices`` trained a batch of ``tokens`` in ``train_s``, of which ``fixed_s`` are fixed.

        >>> TrainerRate.measured(train_s=60.0, fixed_s=20.0, tokens=1000, devices=8).seconds(1000, devices=4)
        100.0
        """
        return cls(fixed_s, max(0.0, train_s - fixed_s) * devices / tokens)

    def seconds(self, tokens: float, devices: int) -> float:
        """Seconds of a batch of ``tokens`` on ``devices``."""
        return self.fixed_s + self.token_s * tokens / devices


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What new weights cost in separate placement."""

    stage_s: float
    """from the end of the update until all replicas have the weights at hand; they decode meanwhile"""
    hold_s: float
    """in which all engines stand still and load them"""


TRAINER_PRESETS = {
    "h20-qwen3-4b": TrainerRate(15.0, 0.65e-3),
    "h100-qwen3-4b": TrainerRate(15.0, 0.12e-3),
}
"""Assumptions for Qwen3-4B in bfloat16; none of the figures was measured."""

UPDATE_PRESET = WeightUpdate(stage_s=5.0, hold_s=1.0)
"""An assumption for a model of 4B parameters that is loaded from host memory (``TRAINER_PRESETS``)."""


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
        self._manager.offer(self._samples.prompts(self._manager.wanted))
        self._manager.begin_version(version)
        if self._samples.all_offered:
            self._manager.note_source(0)
        self._samples.begin_version()
        self._claim()

    def _step(self) -> SeparateStep:
        manager, began = self._manager, self._now
        self._idle_s = self._held_s = 0.0
        self._decode(math.inf)
        waited = self._now - began
        groups = manager.take_batch(stop=False)
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


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a job, and how both sides use them."""

    replicas: int
    """engine replicas that all devices together would make"""
    per_replica: int
    trainer: TrainerRate
    update: WeightUpdate

    @property
    def count(self) -> int:
        return self.replicas * self.per_replica

    def trainers(self, engines: int) -> int:
        """Devices left to the trainer beside ``engines`` replicas."""
        return self.count - engines * self.per_replica


@dataclass(frozen=True, slots=True)
class SeparateForecast:
    """Figures of one split, over the steps after the warm-up unless a field says otherwise; seconds are means."""

    engines: int
    """replicas that decode"""
    trainers: int
    """devices that train"""
    step_s: float
    train_s: float
    """of a step, in which the trainer computes"""
    waiting_s: float
    """of a step, in which the trainer waits for its batch"""
    trained_tokens_per_s: float
    engine_idle: float
    """share of the engines' time without a sample"""
    engine_held: float
    """share of the engines' time in which they stand still for new weights"""
    staleness_mean: float
    """versions, over trained samples"""
    staleness_max: int
    """versions, over all steps"""
    token_age_mean: float
    """versions between a trained token's own and the one that trains it"""

    @property
    def trainer_idle(self) -> float:
        """Share of a step in which the trainer waits for its batch."""
        return self.waiting_s / self.step_s


def forecast_separate(
    admission: Admission,
    scheduling: Scheduling,
    cluster: Cluster,
    lengths: LengthTrace,
    devices: Devices,
    engines: int,
    *,
    warmup: int,
    steps: int = 24,
) -> SeparateForecast:
    """The forecast of ``steps`` steps after ``warmup`` ones (``forecast.warmup_rounds``).

    Args:
        cluster: one replica's speed and slots.
        engines: replicas that decode; all other devices train.
    """
    trainers = devices.trainers(engines)

    def train_s(tokens: int) -> float:
        return devices.trainer.seconds(tokens, trainers)

    split = replace(cluster, replicas=engines)
    simulation = SeparateSimulation(admission, scheduling, split, lengths, train_s, devices.update)
    played = list(simulation.steps(warmup + steps))
    steady = played[warmup:]
    seconds, tokens = sum(s.seconds for s in steady), sum(s.batch.tokens for s in steady)
    return SeparateForecast(
        engines=engines,
        trainers=trainers,
        step_s=seconds / len(steady),
        train_s=sum(train_s(s.batch.tokens) for s in steady) / len(steady),
        waiting_s=sum(s.waiting_s for s in steady) / len(steady),
        trained_tokens_per_s=tokens / seconds,
        engine_idle=sum(s.idle_s for s in steady) / seconds,
        engine_held=sum(s.held_s for s in steady) / seconds,
        staleness_mean=float(np.concatenate([s.batch.staleness.ravel() for s in steady]).mean()),
        staleness_max=max(int(s.batch.staleness.max()) for s in played),
        token_age_mean=sum(s.batch.token_ages for s in steady) / tokens,
    )


def balanced(devices: Devices, round_s: float, tokens: float) -> int:
    """Replicas with which both sides would take equally long, if rounds of ``round_s`` got longer as replicas get fewer.

    Args:
        round_s: seconds in which all replicas decode a batch.
        tokens: of a batch.
    """

    def longer_side(engines: int) -> float:
        decode_s = round_s * devices.replicas / engines
        return max(decode_s, devices.trainer.seconds(tokens, devices.trainers(engines)))

    return min(range(1, devices.replicas), key=longer_side)


def best_split(
    made: Callable[[int], SeparateForecast], start: int, most: int
) -> tuple[SeparateForecast, list[SeparateForecast]]:
    """The fastest forecast that no neighbour beats, and all that were made, by number of replicas.

    Speed has one peak: below it the trainer waits, above it the engines do. So the search climbs from ``start``.

    Args:
        made: the forecast with so many replicas.
        most: largest number of replicas.
    """
    seen: dict[int, SeparateForecast] = {}

    def speed(engines: int) -> float:
        if not 1 <= engines <= most:
            return 0.0
        if engines not in seen:
            seen[engines] = made(engines)
        return seen[engines].trained_tokens_per_s

    best = min(max(start, 1), most)
    while True:
        faster = max((best, best - 1, best + 1), key=speed)
        if faster == best:
            return seen[best], [seen[engines] for engines in sorted(seen)]
        best = faster
