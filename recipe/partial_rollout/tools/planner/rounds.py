"""Plays rounds of partial rollout in either placement, and forecasts the cost of colocated ones in the long run.

The real ``PromptsManager`` decides, a model of the engine decodes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Segment
from recipe.partial_rollout.records.figures import spread
from recipe.partial_rollout.tools.planner.engine_curve import Cluster
from recipe.partial_rollout.tools.planner.replica_model import ReplicaModel
from recipe.partial_rollout.tools.planner.samples import LengthTrace, PlayedSample, PlayedSamples, TrainedBatch

_WORKER = "simulation"


class _Tool(IntEnum):
    """What happens to a tool call; at one moment in this order."""

    IS_LATE = 0
    """its sample gives its slot to another"""
    RETURNS = 1


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What new weights cost in separate placement."""

    stage_s: float
    """from the end of the update until all replicas have the weights at hand; they decode meanwhile"""
    hold_s: float
    """in which all engines stand still and load them"""


@dataclass(frozen=True, slots=True)
class SeparateTrainer:
    """A trainer with devices of its own."""

    train_s: Callable[[int], float]
    """seconds that it takes for a batch of so many tokens"""
    update: WeightUpdate


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """One version and the batch that it trains.

    Colocated, it is a rollout phase; else it lasts from when the engines decode with it until they decode with the next.
    """

    seconds: float
    waiting_s: float
    """of them, in which the trainer waited for its batch"""
    held_s: float
    """in which a replica stood still for new weights, its samples waiting; mean over the replicas"""
    idle_s: float
    """in which a replica had no sample; mean over the replicas"""
    batch: TrainedBatch


class Simulation:
    """Plays rounds, one after the other.

    With a trainer on its own devices a round never ends: samples run through the weight updates, at which every engine
    stands still together::

        engines   |==decode=====================|hold|==decode=====================|hold|==
        trainer   |wait| log-probs, update |stage     |wait| log-probs, update |stage
                       ^ take_batch                  ^ begin_version

    Args:
        settings: mode, sizes and scheduling are played; dynamic sampling is not.
        trainer: None: it shares the replicas' devices, so that each round ends with its batch.
        lengths, seed, groups: see ``PlayedSamples``.

    Raises:
        ValueError: ``lengths`` has groups of another size than ``settings``.
    """

    def __init__(
        self,
        settings: PartialRolloutConfig,
        cluster: Cluster,
        lengths: LengthTrace,
        trainer: SeparateTrainer | None = None,
        *,
        seed: int | None = 0,
        groups: int | None = None,
    ) -> None:
        self._cluster = cluster
        self._trainer = trainer
        self._samples = PlayedSamples(lengths, settings.samples_per_group, seed=seed, groups=groups)
        self._manager = PromptsManager(replace(settings, group_filter=None), clock=lambda: 0.0)
        self._manager.slots.register(_WORKER, cluster.slots_per_replica * cluster.replicas)
        self._version = 0
        self._now = 0.0
        self._tools: list[tuple[float, _Tool, str]] = []
        """heap of what becomes of samples in tools: moment, event, id"""
        self._away: set[str] = set()
        """samples in tools that have left their slot"""
        self._start_engines()

    @property
    def dispatched(self) -> list[np.ndarray]:
        """See ``PlayedSamples.dispatched``."""
        return self._samples.dispatched

    def rounds(self, count: int) -> Iterator[SimulatedRound]:
        """The next ``count`` rounds; fewer if the data runs out."""
        for _ in range(count):
            if self._samples.all_trained:
                return
            if not self._manager.round_open:
                self._start_engines()
                self._begin()
            yield self._round()

    def _start_engines(self) -> None:
        self._replicas = [ReplicaModel(self._cluster.curve) for _ in range(self._cluster.replicas)]
        # The clock starts again with each round, and no time passes between rounds.
        self._tools = [(moment - self._now, event, sample_id) for moment, event, sample_id in self._tools]
        self._now = self._idle_s = self._held_s = 0.0

    def _begin(self) -> None:
        self._manager.reserve.offer(self._samples.prompts(self._manager.wanted))
        if self._samples.all_offered:
            self._manager.reserve.note_source(0)
        self._manager.begin_version(self._version)
        self._samples.begin_version()
        self._claim()

    def _round(self) -> SimulatedRound:
        manager, trainer, began = self._manager, self._trainer, self._now
        self._idle_s = self._held_s = 0.0
        self._decode(math.inf)
        waited = self._now - began
        groups, version = manager.take_batch(stop=trainer is None), manager.version
        if trainer is None:
            self._interrupt_all()
        batch = self._samples.train(groups, version)
        updated = self._now
        if trainer is not None:
            updated += trainer.train_s(batch.tokens) + trainer.update.stage_s
            self._decode(updated)
        manager.groups.train([group.uid for group in groups])
        self._version += 1
        if trainer is not None:
            self._hold(updated, trainer.update.hold_s)
            self._begin()
        replicas = len(self._replicas)
        return SimulatedRound(self._now - began, waited, self._held_s / replicas, self._idle_s / replicas, batch)

    def _decode(self, until: float) -> None:
        """Decode until the clock is ``until``; if that is infinity, until the batch is complete."""
        waiting = math.isinf(until)
        while not (waiting and self._manager.round_complete()):
            busy = min(self._replicas, key=ReplicaModel.next_end)
            end, tool = busy.next_end(), self._tools[0][0] if self._tools else math.inf
            if not waiting and min(end, tool) > until:
                self._now = until
                return
            assert min(end, tool) < math.inf, "no sample is in a replica or a tool, and the batch is not complete"
            if tool < end:
                self._now = max(self._now, tool)
                self._run_tool()
            else:
                self._run_to_event(busy)
                self._now = busy.clock
            self._manager.admit()
            self._claim()

    def _run_to_event(self, replica: ReplicaModel) -> None:
        for sample_id in replica.run_to_event():
            self._end_turn(sample_id, replica.clock)

    def _end_turn(self, sample_id: str, clock: float) -> None:
        tool_s = self._samples.live[sample_id].end_turn(self._manager.version)
        if tool_s is None:
            self._manager.finish(sample_id, self._samples.end(sample_id, self._manager.version))
            return
        heapq.heappush(self._tools, (clock + tool_s, _Tool.RETURNS, sample_id))
        if tool_s > self._cluster.release_after_s:
            heapq.heappush(self._tools, (clock + self._cluster.release_after_s, _Tool.IS_LATE, sample_id))

    def _run_tool(self) -> None:
        _, event, sample_id = heapq.heappop(self._tools)
        if event is _Tool.IS_LATE:
            self._manager.leave(sample_id)
            self._away.add(sample_id)
        elif sample_id in self._away:
            self._away.remove(sample_id)
            self._manager.come_back(sample_id)
        else:
            self._run_on(self._samples.live[sample_id], resumed=True)

    def _claim(self) -> None:
        for grant in self._manager.claim(_WORKER):
            sample, resumed = self._samples.start(grant)
            self._run_on(sample, resumed=resumed)

    def _run_on(self, sample: PlayedSample, *, resumed: bool) -> None:
        """Run it at the replica that has the fewest."""
        replica = min(self._replicas, key=len)
        self._advance(replica, self._now)
        cached = self._cluster.keeps_kv or sample.cached_by == self._manager.version
        replica.add(sample.engine, reads=not (resumed and cached))

    def _advance(self, replica: ReplicaModel, clock: float) -> None:
        if not len(replica):
            self._idle_s += max(0.0, clock - replica.clock)
        replica.advance(clock)

    def _interrupt_all(self) -> None:
        for replica in self._replicas:
            for decoding in replica.interrupt(self._now):
                if decoding.left:
                    self._interrupt(decoding.id)
                else:
                    # The step that the interruption completes has made the last token.
                    self._end_turn(decoding.id, replica.clock)
        self._samples.end_version(self._manager.version)
        self._now = max(replica.clock for replica in self._replicas)

    def _interrupt(self, sample_id: str) -> None:
        zeros = np.broadcast_to(np.float32(0), self._samples.live[sample_id].made_now)
        self._manager.add_segment(sample_id, Segment(zeros.astype(np.int32), zeros, self._manager.version))
        self._manager.interrupt(sample_id)

    def _hold(self, at: float, hold_s: float) -> None:
        """Every replica ends the step that it is in, and loads the weights once all have."""
        for replica in self._replicas:
            self._advance(replica, at)
            while replica.next_end() <= replica.clock:
                self._run_to_event(replica)
        self._now = max(replica.clock for replica in self._replicas) + hold_s
        for replica in self._replicas:
            if len(replica):
                self._held_s += self._now - replica.clock
            else:
                self._idle_s += self._now - replica.clock
            replica.hold(self._now, reads=not self._cluster.keeps_kv)
        self._samples.end_version(self._manager.version)


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
    settings: PartialRolloutConfig,
    cluster: Cluster,
    lengths: LengthTrace,
    *,
    rounds: int = 24,
    warmup: int | None = None,
) -> Forecast:
    """The forecast of ``rounds`` rounds after ``warmup`` ones, by default as many as the window takes to fill."""
    warmup = warmup_rounds(settings.overlap) if warmup is None else warmup
    simulation = Simulation(settings, cluster, lengths)
    played = list(simulation.rounds(warmup + max(rounds, _FIRST)))
    first = np.concatenate([round_.batch.lengths for round_ in played[:_FIRST]])
    dispatched = np.array(simulation.dispatched[: len(first)])
    full = cluster.full_tokens_per_s(settings.batch_samples, lengths.mean_context)
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
