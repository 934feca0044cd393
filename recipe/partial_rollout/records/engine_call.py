"""One request to an engine: made by a worker's client, kept in the trace, read by the tools."""

from __future__ import annotations

from dataclasses import dataclass

from recipe.partial_rollout.records.definitions import busy_from


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request to a replica, as its client saw it."""

    replica: str
    """the load balancer's server id"""
    start: float
    """unix seconds"""
    end: float
    tokens: int
    """decoded by this call"""
    version: int
    """policy version that the replica held; -1 when it did not say"""
    resumed_tokens: int = 0
    """prompt and response tokens that it had to read again because the sample was interrupted; not those found cached"""
    context_tokens: int | None = None
    """prompt and response tokens that it went on from"""
    queued_s: float = 0.0
    """seconds for which it waited in the engine before it was first scheduled; 0 where the replica does not say"""

    def tokens_within(self, start: float, end: float) -> float:
        """Tokens between ``start`` and ``end`` (unix seconds), as if it had made them evenly once it ran."""
        began = busy_from(self)
        inside = min(self.end, end) - max(began, start)
        return self.tokens * max(0.0, inside) / (self.end - began) if self.end > began else 0.0
