"""A rollout phase as the engines saw it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from recipe.partial_rollout.records.engine_call import CallColumns, CallTotals, EngineCall


@dataclass(frozen=True, slots=True)
class RolloutPhase:
    """A time span from the start of a round until every replica is quiet, and its engine calls."""

    start: float
    """unix seconds"""
    end: float
    calls: Sequence[EngineCall] = field(repr=False)
    totals: CallTotals | None = field(default=None, repr=False)
    """of all its calls, in a thinned trace, which keeps the calls of some rounds only; None: ``calls`` are all"""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def decoded_tokens(self) -> int:
        if self.totals is not None:
            return self.totals.tokens
        if isinstance(self.calls, CallColumns):
            return int(self.calls.column("tokens").sum())
        return sum(call.tokens for call in self.calls)

    @property
    def busy(self) -> tuple[np.ndarray, np.ndarray]:
        """[call] when each began to run in its engine, and when it ended"""
        if isinstance(self.calls, CallColumns):
            return self.calls.busy_from, self.calls.column("end")
        return np.array([call.busy_from for call in self.calls]), np.array([call.end for call in self.calls])

    @property
    def replicas(self) -> np.ndarray:
        """[call] index of its replica"""
        if isinstance(self.calls, CallColumns):
            return self.calls.column("replica")
        return np.array([call.replica for call in self.calls], dtype=int)

    @property
    def latest_version(self) -> int:
        """The latest policy version of a call; -1 without one that says."""
        versions = (call.version for call in self.calls)
        return max(versions, default=-1) if self.totals is None else self.totals.latest_version

    @property
    def thinned(self) -> bool:
        """Whether ``calls`` are not all."""
        return self.totals is not None and len(self.calls) < self.totals.calls
