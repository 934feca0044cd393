"""The overlap in force: fixed, moved by ``overlap=auto``, or halved because the policy drifts (``on_drift=shrink``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipe.partial_rollout.records.engine_call import EngineCall
    from recipe.partial_rollout.rollout.overlap_control import OverlapControl


@dataclass(frozen=True, slots=True)
class OverlapChange:
    """A new overlap, for the rounds prepared from here on."""

    overlap: float
    reason: str


class OverlapSteering:
    """Collects what asks for another overlap between two rounds.

    Args:
        overlap: of the first round.
        least: below it the overlap is 0: the share of N that one group is.
        control: of ``overlap=auto``; None if it is fixed.

    >>> steering = OverlapSteering(1.5, least=0.125, control=None)
    >>> steering.shrink("the policy drifts")
    >>> steering.poll()
    OverlapChange(overlap=0.75, reason='the policy drifts')
    >>> print(steering.poll())
    None
    """

    def __init__(self, overlap: float, *, least: float, control: OverlapControl | None) -> None:
        self.overlap = overlap
        """in force"""
        self._least = least
        self._control = control
        self._most: float | None = None
        """what ``shrink`` has left; None: no limit"""
        self._shrunk: str | None = None
        """reason of a ``shrink`` that is not in force yet"""

    def observe(self, calls: Sequence[EngineCall], lengths: Sequence[Sequence[int]]) -> None:
        """Show a round to ``overlap=auto``: its engine calls, and the lengths of each group that it trains."""
        if self._control is not None:
            self._control.observe(calls, lengths)

    def shrink(self, reason: str) -> None:
        """Halve the overlap; ``overlap=auto`` may not go above it again."""
        half = self.overlap / 2
        self._most = half if half >= self._least else 0.0
        self._shrunk = reason

    def poll(self) -> OverlapChange | None:
        """What has changed since the last call; it is then in force."""
        wanted, reason = self.overlap, ""
        if self._control is not None and (decision := self._control.poll()) is not None:
            wanted, reason = decision.overlap, decision.reason
        if self._shrunk is not None:
            reason, self._shrunk = self._shrunk, None
        if self._most is not None and wanted > self._most:
            wanted = self._most
        if wanted == self.overlap:
            return None
        self.overlap = wanted
        return OverlapChange(wanted, reason)

    def metrics(self) -> dict[str, float]:
        """``OverlapControl.metrics``; empty if the overlap is fixed."""
        return self._control.metrics() if self._control is not None else {}
