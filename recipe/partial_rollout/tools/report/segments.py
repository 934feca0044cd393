"""The engine calls of a run as columns, each in a slot of its replica: what timeline page and Chrome trace draw."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.records.run_record import RunRecord


@dataclass(frozen=True, slots=True)
class Lane:
    """A slot of a replica; its calls do not overlap."""

    replica: int
    slot: int
    """From 0; the lowest one that was free. The engines do not say which they used."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The calls of the rounds that count, by lane and, within a lane, by start."""

    lanes: list[Lane]
    counts: np.ndarray
    """int [lane]: calls; those of lane 0 come first, then those of lane 1."""
    start: np.ndarray
    """float64 [call]: unix seconds at which the engine began to run it"""
    end: np.ndarray
    tokens: np.ndarray
    """int [call]: decoded"""
    version: np.ndarray
    """int [call]: policy version; -1 if unknown"""
    interrupted: np.ndarray
    """bool [call]"""
    sample: np.ndarray
    """int [call]: index into `samples`"""
    samples: list[str]
    """Names; the empty one if the trace does not say."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def lane(self) -> np.ndarray:
        """int [call]: index into `lanes`"""
        return np.repeat(np.arange(len(self.lanes)), self.counts)

    def resumptions(self) -> list[tuple[int, int]]:
        """Pairs of calls: one that was interrupted, and the next one of the same sample."""
        order = np.lexsort((self.start, self.sample))
        follows = (self.sample[order][1:] == self.sample[order][:-1]) & self.interrupted[order][:-1]
        named = np.array([bool(name) for name in self.samples], dtype=bool)
        follows &= named[self.sample[order][:-1]] if len(self) else False
        return [(int(order[i]), int(order[i + 1])) for i in np.flatnonzero(follows)]


def segments_of(run: RunRecord) -> Segments:
    """The calls of `run`, of the steps that count."""
    calls = [call for round_ in run.rounds for call in round_.phase.calls]
    by_replica: list[list[EngineCall]] = [[] for _ in range(run.settings.replicas)]
    for call in calls:
        by_replica[int(call.replica)].append(call)
    lanes: list[Lane] = []
    ordered: list[EngineCall] = []
    counts: list[int] = []
    for replica, found in enumerate(by_replica):
        for slot, of_slot in enumerate(in_slots(found)):
            lanes.append(Lane(replica, slot))
            counts.append(len(of_slot))
            ordered += of_slot
    names: dict[str, int] = {}
    samples = [names.setdefault(call.sample, len(names)) for call in ordered]
    return Segments(
        lanes=lanes,
        counts=np.array(counts, dtype=np.int64),
        start=np.array([call.busy_from for call in ordered], dtype=np.float64),
        end=np.array([call.end for call in ordered], dtype=np.float64),
        tokens=np.array([call.tokens for call in ordered], dtype=np.int64),
        version=np.array([call.version for call in ordered], dtype=np.int64),
        interrupted=np.array([call.interrupted for call in ordered], dtype=bool),
        sample=np.array(samples, dtype=np.int64),
        samples=list(names),
    )


def in_slots(calls: Sequence[EngineCall]) -> list[list[EngineCall]]:
    """The calls of one replica, dealt to as few slots as keep them apart.

    >>> a, b, c = (EngineCall(0, start, start + 2, 1, 0) for start in (0.0, 1.0, 2.0))
    >>> [[call.start for call in slot] for slot in in_slots([a, b, c])]
    [[0.0, 2.0], [1.0]]
    """
    slots: list[list[EngineCall]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for call in sorted(calls, key=lambda call: (call.busy_from, call.end)):
        while busy and busy[0][0] <= call.busy_from:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot = len(slots)
            slots.append([])
        slots[slot].append(call)
        heapq.heappush(busy, (call.end, slot))
    return slots
