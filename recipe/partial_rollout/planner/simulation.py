"""Plays rounds of partial rollout: the real ``PromptsManager`` decides, a model of the engine decodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Grant, Prompt, SampleOutput, Segment
from recipe.partial_rollout.planner.engine_curve import EngineCurve
from recipe.partial_rollout.planner.lengths import LengthTrace
from recipe.partial_rollout.planner.replica_model import Decoding, ReplicaModel

_WORKER = "simulation"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The replicas that decode."""

    curve: EngineCurve
    """speed of each replica"""
    replicas: int
    slots_per_replica: int
    keeps_kv: bool = False
    """whether interrupted samples keep their keys and values (``partial_rollout.resume_kv=keep``)"""

    def full_tokens_per_s(self, samples: int, context: float) -> float:
        """Tokens/s of all replicas while ``samples`` with ``context`` tokens each run, or fewer for want of slots."""
        running = min(samples / self.replicas, self.slots_per_replica)
        return self.replicas * running / self.curve.decode_s(running, running * context)


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


@dataclass(slots=True)
class _Sample:
    length: int
    engine: Decoding
    first_version: int | None = None
    """version that decoded its first token"""
    made_before: int = 0
    """tokens made in rounds before the present one"""
    ended_version: int | None = None
    token_versions: int = 0
    """sum over its tokens of the version that made each"""

    @property
    def made(self) -> int:
        return self.length - self.engine.left


class Simulation:
    """Plays rounds, one after the other.

    Args:
        admission: mode and sizes, as the recipe's settings make them.
        lengths: response lengths by group; its group size must be the admission's.
        seed: for drawing groups from ``lengths``; None: they come in order, over and over.
        groups: number of groups in the data; None: endless.

    Raises:
        ValueError: the sizes differ.
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
        if lengths.samples_per_group != admission.samples_per_group:
            raise ValueError(
                f"lengths are of groups of {lengths.samples_per_group}, rollout.n is {admission.samples_per_group}"
            )
        self._n = admission.samples_per_group
        self._cluster = cluster
        self._prompt_tokens = lengths.prompt_tokens
        self._lengths = lengths.replay() if seed is None else lengths.draw(seed)
        self._manager = PromptsManager(admission, scheduling, clock=lambda: 0.0)
        self._manager.register_worker(_WORKER, cluster.slots_per_replica * cluster.replicas)
        self._groups = groups
        self._offered = 0
        self._left: dict[str, list[int]] = {}
        """for each group offered and not trained: lengths of its samples that have not started, last first"""
        self._samples: dict[str, _Sample] = {}
        self.dispatched: list[np.ndarray] = []
        """lengths of the groups offered, in order; int [samples of a group] each"""

    def rounds(self, count: int) -> Iterator[SimulatedRound]:
        """The next ``count`` rounds; fewer if the data runs out."""
        for _ in range(count):
            self._offer()
            if self._offered == self._groups and not self._left:
                return
            self._manager.open_round()
            yield self._round()

    def _offer(self) -> None:
        wanted = self._manager.wanted
        if self._groups is not None:
            wanted = min(wanted, self._groups - self._offered)
        for _ in range(wanted):
            uid = f"0/{self._offered}"
            self.dispatched.append(next(self._lengths))
            self._left[uid] = self.dispatched[-1].tolist()[::-1]
            self._manager.offer([Prompt(uid, 0, {})])
            self._offered += 1
        if self._offered == self._groups:
            self._manager.close_source()

    def _round(self) -> SimulatedRound:
        manager, now = self._manager, 0.0
        replicas = [ReplicaModel(self._cluster.curve) for _ in range(self._cluster.replicas)]
        for sample in self._samples.values():
            sample.made_before = sample.made
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
        decoded = sum(sample.made - sample.made_before for sample in self._samples.values())
        return self._train(end, decoded)

    def _claim(self, replicas: list[ReplicaModel], now: float) -> None:
        """Claim samples; each starts at the replica that has the fewest."""
        for grant in self._manager.claim(_WORKER):
            replica = min(replicas, key=len)
            replica.advance(now)
            sample, resumed = self._sample(grant)
            replica.add(sample.engine, reads=not (resumed and self._cluster.keeps_kv))

    def _sample(self, grant: Grant) -> tuple[_Sample, bool]:
        known = self._samples.get(grant.sample_id)
        if known is not None:
            return known, True
        length = self._left[grant.group_uid].pop()
        engine = Decoding(grant.sample_id, self._prompt_tokens, length, grant.order)
        self._samples[grant.sample_id] = sample = _Sample(length, engine)
        return sample, False

    def _finish(self, sample_id: str) -> None:
        sample = self._samples[sample_id]
        sample.ended_version = self._manager.version
        self._note_made(sample)
        self._manager.finish(sample_id, _output(sample.length))

    def _interrupt(self, sample_id: str) -> None:
        sample = self._samples[sample_id]
        made = self._note_made(sample)
        zeros = np.broadcast_to(np.float32(0), made)
        self._manager.add_segment(sample_id, Segment(zeros.astype(np.int32), zeros, self._manager.version))
        self._manager.interrupt(sample_id)

    def _note_made(self, sample: _Sample) -> int:
        """Note which version made the round's tokens of ``sample``; returns how many they are."""
        version, made = self._manager.version, sample.made - sample.made_before
        if sample.first_version is None and sample.made:
            sample.first_version = version
        sample.token_versions += version * made
        return made

    def _train(self, seconds: float, decoded: int) -> SimulatedRound:
        manager, version = self._manager, self._manager.version
        groups = manager.take_batch()
        trained = [[self._samples.pop(f"{group.uid}#{i}") for i in range(self._n)] for group in groups]
        manager.acknowledge([group.uid for group in groups])
        for group in groups:
            del self._left[group.uid]
        manager.advance_version(version + 1)
        return SimulatedRound(
            seconds=seconds,
            decoded_tokens=decoded,
            lengths=np.array([[sample.length for sample in group] for group in trained]),
            staleness=np.array([[version - (sample.first_version or 0) for sample in group] for group in trained]),
            on_policy_tokens=sum(
                sample.length - sample.made_before
                for group in trained
                for sample in group
                if sample.ended_version == version
            ),
            token_ages=sum(version * s.length - s.token_versions for group in trained for s in group),
        )


def _output(length: int) -> SampleOutput:
    """An output of ``length`` tokens whose arrays take no memory."""
    zeros = np.broadcast_to(np.int32(0), length)
    return SampleOutput(zeros[:0], zeros, zeros, zeros, zeros, 1, None, {}, 2, {})
