"""The engine calls of a run as columns, each in a slot of its replica: what timeline page and Chrome trace draw."""

import heapq
from dataclasses import dataclass

import numpy as np

from recipe.partial_rollout.records.calls import CallColumns
from recipe.partial_rollout.records.run import RunRecord


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
    """The calls of `run`, of the steps that count; of a thinned trace, those that it has."""
    calls = [round_.phase.calls for round_ in run.rounds]
    columns = [each if isinstance(each, CallColumns) else CallColumns(each) for each in calls]
    names: dict[str, int] = {}
    sample = np.array([names.setdefault(name, len(names)) for each in columns for name in each.samples], np.int64)
    start, end, replica = (
        np.concatenate([part(each) for each in columns])
        for part in (lambda each: each.busy_from, lambda each: each.column("end"), lambda each: each.column("replica"))
    )
    slot = np.zeros(len(start), np.int64)
    for each in range(run.settings.replicas):
        mine = np.flatnonzero(replica == each)
        slot[mine] = in_slots(start[mine], end[mine])
    order = np.lexsort((end, start, slot, replica))
    places, counts = np.unique(np.stack([replica, slot])[:, order], axis=1, return_counts=True)

    def ordered(name: str) -> np.ndarray:
        return np.concatenate([each.column(name) for each in columns])[order].astype(np.int64)

    return Segments(
        lanes=[Lane(*place) for place in places.T.tolist()],
        counts=counts,
        start=start[order],
        end=end[order],
        tokens=ordered("tokens"),
        version=ordered("version"),
        interrupted=ordered("interrupted").astype(bool),
        sample=sample[order],
        samples=list(names),
    )


def in_slots(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """[call] its slot: the calls of one replica, dealt to as few slots as keep them apart.

    >>> in_slots(np.array([0.0, 1.0, 2.0]), np.array([2.0, 3.0, 4.0])).tolist()
    [0, 1, 0]
    """
    slots = np.zeros(len(start), np.int64)
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for at in np.lexsort((end, start)).tolist():
        while busy and busy[0][0] <= start[at]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        # A new slot has the lowest number that is not in use.
        slots[at] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (float(end[at]), int(slots[at])))
    return slots
