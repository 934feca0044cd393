"""How long the rollout has stood still, and when that ends the run."""

from __future__ import annotations

import time


class StallClock:
    """Seconds since a sample last reported or an engine last made a token, against the most that is allowed.

    While a sample is away that is at least the longest deadline of what it may await.

    Args:
        stall_s: allowed while none is away.
        away_s: longest deadline of a tool and of the reward; None: a tool may take any time, which is no excuse.

    >>> clock = StallClock(stall_s=60.0, away_s=600.0)
    >>> 59 < clock.left_s(away=0) <= 60, 599 < clock.left_s(away=1) <= 600
    (True, True)
    >>> clock.words(away=0)
    'no sample reported and no engine made a token for 0 s (partial_rollout.deadlines.stall_s=60)'
    """

    def __init__(self, stall_s: float, away_s: float | None = None) -> None:
        self._stall_s = stall_s
        self._away_s = max(stall_s, away_s or 0.0)
        self.touch()

    def touch(self) -> None:
        """Note that there was progress."""
        self._moved_at = time.monotonic()

    def left_s(self, away: int) -> float:
        """Seconds until the rollout, ``away`` of whose samples are, counts as stalled; 0 or less: it is."""
        return self._moved_at + (self._away_s if away else self._stall_s) - time.monotonic()

    def words(self, away: int) -> str:
        """How long nothing happened, for the error that ends the run."""
        idle = f"no sample reported and no engine made a token for {time.monotonic() - self._moved_at:.0f} s"
        limit = f"partial_rollout.deadlines.stall_s={self._stall_s:g}"
        if away and self._away_s > self._stall_s:
            limit += f"; {self._away_s:g} s with {away} in a tool or reward, the longest deadline of either"
        return f"{idle} ({limit})"
