"""The engine calls of a run as columns, each in a slot of its replica: what the timeline page draws."""

import heapq
from dataclasses import dataclass

import numpy as np

from recipe.partial_rollout.tools.run_record import RunRecord


@dataclass(frozen=True, slots=True)
class Segments:
    """The calls of the rounds that count, by lane and, within a lane, by start."""

    lanes: list[tuple[int, int, int, bool]]
    """Replica, slot, number of calls, and whether it is no slot but has samples between two turns, in a tool or in their
    agent loop. The calls of lane 0 come first. A slot is the lowest that was free: engines do not say which they used.
    """
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
    """Names; the empty one if the run does not say."""


def segments_of(run: RunRecord) -> Segments:
    """The calls of `run`, of the steps that count, and what lay between them."""
    calls = run.calls
    names = {name: code for code, name in enumerate(dict.fromkeys(calls.column("sample")))}
    left, begin, back = calls.between_turns()
    # A tool's bar has the place of the call before it.
    source = np.concatenate([np.arange(len(calls)), left])
    tools = np.arange(len(source)) >= len(calls)
    start, end = np.concatenate([calls.column("busy_from"), begin]), np.concatenate([calls.column("end"), back])
    place = 2 * calls.column("replica")[source].astype(np.int64) + tools
    slot = np.zeros(len(source), np.int64)
    for each in np.unique(place):
        mine = np.flatnonzero(place == each)
        slot[mine] = in_slots(start[mine], end[mine])
    order = np.lexsort((end, start, slot, place))
    places, counts = np.unique(np.stack([place, slot])[:, order], axis=1, return_counts=True)

    def ordered(name: str) -> np.ndarray:
        return calls.column(name)[source].astype(np.int64)[order]

    return Segments(
        lanes=[
            (at // 2, number, count, bool(at % 2))
            for (at, number), count in zip(places.T.tolist(), counts.tolist(), strict=True)
        ],
        start=start[order],
        end=end[order],
        tokens=np.where(tools[order], 0, ordered("tokens")),
        version=ordered("version"),
        interrupted=ordered("interrupted").astype(bool) & ~tools[order],
        sample=np.fromiter((names[name] for name in calls.column("sample")), np.int64, len(calls))[source][order],
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
