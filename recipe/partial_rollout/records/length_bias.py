"""Length bias: do trained responses have the lengths of the dispatched ones, in the long run and batch by batch?

Short responses finish first, so whoever trains what is ready may make batches of short groups and batches of long ones.
A batch is given by the mean response length of each of its groups, float [groups], tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Batches = Sequence[Sequence[float] | np.ndarray]


def length_bias(trained: Sequence[int] | np.ndarray, dispatched: Sequence[int] | np.ndarray) -> float | None:
    """Mean length of the first samples trained over that of the first dispatched; None if one of them is unknown.

    >>> length_bias(trained=[10, 30], dispatched=[10, 50])
    0.6666666666666666
    """
    if not len(trained) or not np.any(dispatched):
        return None
    return float(np.mean(trained) / np.mean(dispatched))


def variation(batches: Batches) -> float | None:
    """Standard deviation of the batches' mean length over its mean; None for fewer than two batches.

    >>> variation([[10, 30], [20, 40], [30, 50]])
    0.3333333333333333
    """
    means = np.array([np.mean(batch) for batch in batches])
    if len(means) < 2 or not means.any():
        return None
    return float(means.std(ddof=1) / means.mean())


def excess_variation(batches: Batches) -> float | None:
    """``variation`` over that of random batches of the same groups: 1 is what chance gives, and so noPR's.

    Its square is the mean square between batches over the total mean square, whose expectation over all ways to deal the
    groups to batches is 1 (one-way analysis of variance). None for fewer than two batches, or if all lengths are equal.

    >>> excess_variation([[10, 50], [20, 40], [30, 30]]), excess_variation([[10, 20], [30, 30], [40, 50]])
    (0.0, 1.5)
    """
    if len(batches) < 2:
        return None
    groups = np.concatenate([np.asarray(batch, float) for batch in batches])
    if not np.ptp(groups):
        return None
    between = sum(len(batch) * (np.mean(batch) - groups.mean()) ** 2 for batch in batches) / (len(batches) - 1)
    return float(np.sqrt(between / groups.var(ddof=1)))


def quartile_deviation(batches: Batches, dispatched: Sequence[float] | np.ndarray, window: int) -> float | None:
    """How unevenly ``window`` batches in a row draw on the quartiles of the dispatched groups' lengths.

    For each window the largest relative deviation of a quartile's share of the trained groups from a quarter, averaged
    over windows: 0 if each quartile gives a quarter, 3 if all groups come from one. None if there is no whole window.

    >>> quartile_deviation([[1, 2], [3, 4]], dispatched=[1, 2, 3, 4], window=1)
    1.0
    >>> quartile_deviation([[1, 2], [3, 4]], dispatched=[1, 2, 3, 4], window=2)
    0.0
    """
    edges = np.quantile(dispatched, [0.25, 0.5, 0.75])
    counts = np.array([np.bincount(np.searchsorted(edges, batch), minlength=4) for batch in batches])
    whole = len(counts) // window
    if not whole:
        return None
    shares = counts[: whole * window].reshape(whole, window, 4).sum(axis=1)
    shares = shares / shares.sum(axis=1, keepdims=True)
    return float(np.abs(4 * shares - 1).max(axis=1).mean())
