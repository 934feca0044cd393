"""Simulate rounds of colocated partial rollout, and forecast their cost in the long run.

The real ``PromptsManager`` decides, and knows which version made which tokens; a model of the engine decodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from recipe.partial_rollout.config.settings import Mode, PartialRolloutConfig, Scheduling
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Prompt, SampleOutput, Segment
from recipe.partial_rollout.records.metrics import spread
from recipe.partial_rollout.tools.planner.engine_curve import Cluster
from recipe.partial_rollout.tools.planner.lengths import LengthTrace
from recipe.partial_rollout.tools.planner.replica_model import Decoding, ReplicaModel

_WORKER = "simulation"


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """A rollout phase and the batch that it trains, of ``g`` groups of ``n`` samples."""

    seconds: float
    lengths: np.ndarray
    """int [g, n], tokens"""
    staleness: np.ndarray
    """int [g, n], version whose update trains the sample, minus the version of its first token"""

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


class Simulation:
    """Simulates rounds, one after the other.

    Args:
        settings: mode, sizes, overlap, bound and scheduling are used; dynamic sampling is not simulated.
        cluster: the replicas that decode.
        lengths: response lengths by group.
        seed: shuffles the groups of ``lengths``, which are then repeated in this order; None: the given order.
        groups: number of groups in the data; None: endless.

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
        if (n := lengths.groups.shape[1]) != settings.samples_per_group:
            raise ValueError(f"lengths are of groups of {n}, rollout.n is {settings.samples_per_group}")
        self._cluster = cluster
        self._lengths = lengths
        count = len(lengths.groups)
        self._order = itertools.cycle(range(count) if seed is None else np.random.default_rng(seed).permutation(count))
        self._groups = math.inf if groups is None else groups
        self.dispatched: list[np.ndarray] = []
        """lengths of the groups offered, in order; int [n] each"""
        self._trained = 0
        """number of trained groups"""
        self._live: dict[str, Decoding] = {}
        """samples that have started and not ended, by id"""
        self._manager = PromptsManager(replace(settings, group_filter=None), clock=lambda: 0.0)
        self._manager.slots.register(_WORKER, cluster.slots_per_replica * cluster.replicas)
        self._version = 0
        self._now = 0.0

    def rounds(self, count: int) -> Iterator[SimulatedRound]:
        """The next ``count`` rounds; fewer if the data runs out."""
        for _ in range(count):
            if self._trained == self._groups:
                return
            yield self._round()

    def _round(self) -> SimulatedRound:
        self._replicas = [ReplicaModel(self._cluster.curve) for _ in range(self._cluster.replicas)]
        # The clock starts again with each round.
        self._now = 0.0
        self._begin()
        self._decode()
        taken, version = self._manager.take_batch(stop=True), self._version
        self._interrupt_all()
        self._manager.groups.train()
        self._trained += len(taken)
        self._version += 1
        batch = [group.outputs for group in taken]
        return SimulatedRound(
            seconds=self._now,
            lengths=np.array([[output.response_length for output in outputs] for outputs in batch]),
            staleness=np.array([[output.staleness(version) for output in outputs] for outputs in batch]),
        )

    def _begin(self) -> None:
        first = len(self.dispatched)
        count = int(min(self._manager.wanted, self._groups - first))
        self.dispatched += [self._lengths.groups[at] for at in itertools.islice(self._order, count)]
        prompts = [Prompt(f"0/{at}", {"lengths": self.dispatched[at]}) for at in range(first, first + count)]
        self._manager.backlog.enqueue(prompts, 0 if len(self.dispatched) == self._groups else math.inf)
        self._manager.begin_version(self._version)
        self._claim()

    def _decode(self) -> None:
        """Decode until the batch is complete."""
        while not self._manager.round_complete():
            busy = min(self._replicas, key=ReplicaModel.next_end)
            assert busy.next_end() < math.inf, "no sample is in a replica, and the batch is not complete"
            for sample_id in busy.run_to_end():
                self._finish(sample_id)
            self._now = busy.clock
            self._manager.admit()
            self._claim()

    def _claim(self) -> None:
        """Start or continue each sample that got a slot, at the replica that runs the fewest samples."""
        for lease in self._manager.claim(_WORKER):
            if lease.sample_id not in self._live:
                length = int(lease.row["lengths"][int(lease.sample_id.partition("#")[2])])
                self._live[lease.sample_id] = Decoding(lease.sample_id, self._lengths.prompt_tokens, length)
            replica = min(self._replicas, key=len)
            replica.advance(self._now)
            replica.add(self._live[lease.sample_id], reads=not (lease.resident and self._cluster.keeps_kv))

    def _interrupt_all(self) -> None:
        for replica in self._replicas:
            for decoding in replica.interrupt(self._now):
                if decoding.left:
                    self._manager.add(decoding.id, [self._segment(decoding)])
                    self._manager.interrupt(decoding.id)
                else:
                    # The step that was running at the interruption is completed, and decoded the sample's last token.
                    self._finish(decoding.id)
        self._now = max(replica.clock for replica in self._replicas)

    def _segment(self, decoding: Decoding) -> Segment:
        """Return the segment that this version has decoded. Its tokens are zeros, broadcast so that they take no
        memory."""
        cached = self._manager.samples.unfinished[decoding.id].cached_tokens
        made = np.broadcast_to(np.int32(0), decoding.context - self._lengths.prompt_tokens - cached)
        return Segment(made, made, self._version)

    def _finish(self, sample_id: str) -> None:
        sample = self._manager.samples.unfinished[sample_id]
        segments = [*sample.segments, self._segment(self._live.pop(sample_id))]
        versions = np.repeat([each.version for each in segments], [len(each) for each in segments])
        zeros, ones = (np.broadcast_to(np.int32(each), len(versions)) for each in (0, 1))
        output = SampleOutput(zeros[:0], zeros, ones, zeros, versions, len(segments), None, {}, 2, {})
        self._manager.finish(sample_id, output)


_ROUNDS = 24
"""rounds that a forecast averages, after those in which the window fills"""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Figures of one schedule, once its window is full."""

    round_s: float
    """mean seconds of a round"""
    trained_tokens_per_s: float
    staleness_mean: float
    """versions, over trained samples"""
    staleness_p95: float


def forecast(
    settings: PartialRolloutConfig, cluster: Cluster, lengths: LengthTrace, *, rounds: int = _ROUNDS
) -> Forecast:
    """The forecast of ``rounds`` rounds after those in which the window fills."""
    filling = 2 + math.ceil(2 * settings.overlap)
    steady = list(Simulation(settings, cluster, lengths).rounds(filling + rounds))[filling:]
    seconds, tokens = sum(r.seconds for r in steady), sum(r.tokens for r in steady)
    staleness = spread(np.concatenate([r.staleness.ravel() for r in steady]))
    assert staleness is not None
    return Forecast(seconds / len(steady), tokens / seconds, staleness.mean, staleness.p95)


def baseline(settings: PartialRolloutConfig) -> PartialRolloutConfig:
    """noPR with the sizes of ``settings``: every round waits for its slowest sample."""
    return replace(settings, mode=Mode.WINDOW, overlap=0.0, max_staleness=0, scheduling=Scheduling())
