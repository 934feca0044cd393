"""Arithmetic of time spans: unions, differences, sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Span = tuple[float, float]
"""Start and end, in seconds; one that ends where it starts is left out of every result."""


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments in as few spans as possible, by start.

    >>> union([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def without(spans: Iterable[Span], *cuts: Iterable[Span]) -> list[Span]:
    """The moments of `spans` that lie in none of `cuts`, by start.

    >>> without([(0, 10)], [(2, 3)], [(8, 12)])
    [(0, 2), (3, 8)]
    """
    left: list[Span] = []
    gone = union(span for cut in cuts for span in cut)
    at = 0
    for start, end in union(spans):
        while at < len(gone) and gone[at][1] <= start:
            at += 1
        for cut_start, cut_end in gone[at:]:
            if cut_start >= end:
                break
            if cut_start > start:
                left.append((start, cut_start))
            start = max(start, cut_end)
        if end > start:
            left.append((start, end))
    return left


def within(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The moments of `spans` between `start` and `end`, by start.

    >>> within([(0, 4), (6, 9)], 3, 7)
    [(3, 4), (6, 7)]
    """
    return union((max(a, start), min(b, end)) for a, b in spans if b > start and a < end)


def common(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The moments that lie in both, by start.

    >>> common([(0, 4), (6, 9)], [(3, 7)])
    [(3, 4), (6, 7)]
    """
    spans = union(spans)
    return without(spans, without(spans, others))


def seconds(spans: Iterable[Span]) -> float:
    """Sum of the spans' lengths, as they are: where two overlap, both count."""
    return sum(end - start for start, end in spans)


def at_once(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Moments, and how many of `spans` there are from each to the next; the last count is 0.

    >>> [column.tolist() for column in at_once([(0, 4), (1, 2)])]
    [[0, 1, 2, 4], [1, 2, 1, 0]]
    """
    edges = np.array(spans).reshape(-1, 2)
    moments, where = np.unique(edges.T.ravel(), return_inverse=True)
    changes = np.zeros(len(moments), dtype=int)
    np.add.at(changes, where, np.repeat([1, -1], len(edges)))
    return moments, np.cumsum(changes)


def overlap_s(spans: Sequence[Span], others: Iterable[Span]) -> float:
    """Seconds of `spans` that lie in `others`: where two of the `spans` overlap, both count.

    >>> overlap_s([(0, 4), (1, 4)], [(3, 9)])
    2.0
    """
    places = union(others)
    if not spans or not places:
        return 0.0
    edges = np.array(places)
    lengths = edges[:, 1] - edges[:, 0]
    ends = np.cumsum(lengths)
    # Seconds of `others` before each of their edges: from edge to edge they grow with the time, or not at all.
    before = np.stack([ends - lengths, ends], axis=1)
    inside = np.interp(np.array(spans), edges.ravel(), before.ravel())
    return float(np.sum(inside[:, 1] - inside[:, 0]))
