"""How long the rollout has been without progress."""

from __future__ import annotations

import time


class StallClock:
    """Seconds since a sample last reported or an engine last made a token, against the most that is allowed.

    >>> clock = StallClock(stall_s=60.0)
    >>> clock.stalled, 59 < clock.left_s <= 60
    (False, True)
    >>> clock.words
    'no sample reported and no engine made a token for 0 s (partial_rollout.deadlines.stall_s=60)'
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._moved_at = time.monotonic()

    def touch(self) -> None:
        """Note that there was progress."""
        self._moved_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._moved_at

    @property
    def left_s(self) -> float:
        """Seconds until the rollout counts as stalled; at least 0.1 s."""
        return max(0.1, self._stall_s - self.idle_s)

    @property
    def stalled(self) -> bool:
        return self.idle_s >= self._stall_s

    @property
    def words(self) -> str:
        """How long nothing happened, for the error that ends the run."""
        idle = f"no sample reported and no engine made a token for {self.idle_s:.0f} s"
        return f"{idle} (partial_rollout.deadlines.stall_s={self._stall_s:g})"
