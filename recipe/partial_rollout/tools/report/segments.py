"""Data of the page's timeline: engine calls, each in a slot of its replica, its rounds and phases."""

import base64
import heapq
from typing import Any

import numpy as np

from recipe.partial_rollout.tools.run_record import RunRecord


def drawn(run: RunRecord) -> dict[str, Any]:
    """Return the timeline's data for one run, without undone steps; times are in ms from the start of its first
    round."""
    return {
        "ends": _ms(run.end - run.start),
        "rounds": [
            [
                round_.step,
                round_.version,
                _ms(round_.phase.start - run.start),
                _ms(round_.phase.end - run.start),
                _ms(round_.interrupt_s),
                _ms(round_.resume_s),
                round_.carried_groups,
            ]
            for round_ in run.rounds
        ],
        "phases": [
            [phase.name, phase.step, _ms(phase.start - run.start), _ms(phase.end - run.start)]
            # Longer phases first: a phase is drawn on top of the phases that contain it.
            for phase in sorted(run.phases, key=lambda phase: (phase.step, phase.start - phase.end))
            if phase.end > run.start
        ],
        **_segments(run),
    }


def _segments(run: RunRecord) -> dict[str, Any]:
    """Return the bars of the timeline as columns, sorted by lane, then by start.

    A column is base64 of little-endian numbers (``_column``). ``start`` and ``length`` are in ms; ``start`` is counted
    from the run's first round. A bar is an engine call, or a gap between two turns, in which the sample's tool or agent
    loop works. ``lanes`` has (replica, slot, count of bars, whether its bars are gaps) for each lane; gaps have lanes
    of their own. Engines do not report which slot a call used, so each call gets the lowest slot that is free.
    ``sample`` is an index into ``samples``, in which "" stands for calls that name no sample. ``version`` is -1 if
    unknown.
    """
    calls = run.calls
    names, sample = np.unique(calls.column("sample"), return_inverse=True)
    left, begin, back = calls.between_turns()
    # A gap has the sample, version and replica of the call before it.
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
    source, tools = source[order], tools[order]
    begun = np.maximum(start[order] - run.start, 0.0)
    lasted = np.maximum(end[order] - run.start, begun) - begun
    return {
        "lanes": [
            (at // 2, number, count, bool(at % 2))
            for (at, number), count in zip(places.T.tolist(), counts.tolist(), strict=True)
        ],
        "samples": names.tolist(),
        "start": _column(begun * 1e3, np.uint32),
        "length": _column(lasted * 1e3, np.uint32),
        "tokens": _column(np.where(tools, 0, calls.column("tokens")[source]), np.uint32),
        "version": _column(calls.column("version")[source], np.int32),
        "sample": _column(sample[source], np.uint32),
        "interrupted": _column(calls.column("interrupted")[source] & ~tools, np.uint8),
    }


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


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else max(0, round(seconds * 1e3))


def _column(values: np.ndarray, kind: type[np.generic]) -> str:
    """Base64 of the little-endian numbers."""
    return base64.b64encode(np.rint(values).astype(np.dtype(kind).newbyteorder("<")).tobytes()).decode()
