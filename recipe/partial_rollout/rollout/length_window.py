"""Metric ``length/batch_variation``: do the last batches differ in length by more than chance?"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from recipe.partial_rollout.records.length_bias import excess_variation
from recipe.partial_rollout.records.trained_group import TrainedGroup

BATCHES = 10
"""batches that the metric compares"""


class LengthWindow:
    """The last ``BATCHES`` batches of a run; begins anew when a run resumes."""

    def __init__(self) -> None:
        self._batches: deque[np.ndarray] = deque(maxlen=BATCHES)

    def observe(self, trained: Sequence[TrainedGroup]) -> dict[str, float]:
        """The metric after one more batch; empty until ``BATCHES`` have been seen.

        It is the standard deviation of the batches' mean length over that of random batches of the same groups
        (``records.length_bias.excess_variation``): 1 on average under noPR, with a standard error of .2. Lengths that
        drift within ten steps raise it a little, under noPR too.
        """
        self._batches.append(np.array([np.mean(group.lengths) for group in trained]))
        found = excess_variation(self._batches) if len(self._batches) == BATCHES else None
        return {} if found is None else {"length/batch_variation": found}
