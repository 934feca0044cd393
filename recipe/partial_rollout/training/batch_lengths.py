"""A warning that batches are biased samples: they differ in length by more than chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VARIATION = "partial_rollout/length/batch_variation"
"""see ``rollout.length_window``"""
_LIMIT, _STEPS = 1.5, 5
"""the warning needs more than this, in so many steps in a row"""


class BatchLengths:
    """Watches ``VARIATION``.

    Batches of 8 drawn at random from the lengths of a noPR run of the quick start's task raise the warning in 2 of 100
    runs of 48 steps, in 3 if their mean length doubles meanwhile.
    """

    def __init__(self) -> None:
        self._above = 0

    def observe(self, data: Mapping[str, Any], step: int) -> str | None:
        """A warning in the step in which the limit has been passed often enough in a row; None in all others."""
        if VARIATION not in data:
            return None
        self._above = self._above + 1 if data[VARIATION] > _LIMIT else 0
        if self._above != _STEPS:
            return None
        return (
            f"warning: at step {step} the last batches differ in length {data[VARIATION]:.1f} times as much as chance "
            f"would have it ({VARIATION}, above {_LIMIT} for {_STEPS} steps): some are of short groups, some of long ones. "
            f"Set partial_rollout.scheduling.overtake"
        )
