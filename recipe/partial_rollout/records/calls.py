"""Engine calls, and the rollout phases that they ran in."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from msgspec import Struct


class EngineCall(Struct, frozen=True, array_like=True, gc=False):
    """One request to a replica, as its client saw it; in ``run.jsonl`` a list of the fields in their order.

    >>> call = EngineCall("10.0.0.1:8000", start=0.0, end=10.0, tokens=40, version=3, queued_s=2.0)
    >>> call.busy_from, call.tokens_within(0.0, 6.0)
    (2.0, 20.0)
    """

    replica: str | int
    """the load balancer's server id; in ``run.jsonl`` the replica's index"""
    start: float
    """unix seconds"""
    end: float
    tokens: int
    """decoded by this call"""
    version: int
    """policy version that the replica held; -1 if it did not say"""
    resumed_tokens: int = 0
    """tokens that it prefilled again after an interruption, or after a tool; those still cached do not count"""
    context_tokens: int = 0
    """prompt and response tokens that it started from; 0 if not noted"""
    queued_s: float = 0.0
    """seconds that it waited in the engine before it was first scheduled; 0 if the replica does not say"""
    sample: str = ""
    """the sample: ``epoch/position#index`` under PR, verl's request id under noPR; "" if not noted"""
    interrupted: bool = False
    """whether the engine aborted it, so that the sample resumes with another call"""
    earlier_tokens: int = 0
    """of ``context_tokens``, those of the conversation's earlier turns, if it begins a turn: what it reads again"""
    waited_s: float = 0.0
    """seconds before ``start`` that its sample waited for a slot in an open round; 0 if not noted, and under noPR"""

    @property
    def busy_from(self) -> float:
        """When it began to run in its engine (unix seconds); while it queues it makes no token and its slot is empty."""
        return min(self.start + self.queued_s, self.end)

    def tokens_within(self, start: float, end: float) -> float:
        """Tokens made between ``start`` and ``end`` (unix seconds), assuming that it made them evenly once it ran."""
        inside = min(self.end, end) - max(self.busy_from, start)
        return self.tokens * max(0.0, inside) / (self.end - self.busy_from) if self.end > self.busy_from else 0.0


class RolloutPhase(Struct, frozen=True):
    """A time span from the start of a round until every replica is quiet, and its engine calls."""

    start: float
    """unix seconds"""
    end: float
    calls: Collection[EngineCall]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def column(self, name: str) -> np.ndarray:
        """[call] attribute ``name`` of each"""
        columns = getattr(self.calls, "column", None)
        return columns(name) if columns else np.array([getattr(call, name) for call in self.calls])

    @property
    def decoded_tokens(self) -> int:
        return int(self.column("tokens").sum())
