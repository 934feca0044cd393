"""A rollout phase as the engines saw it."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipe.partial_rollout.records.engine_call import EngineCall


@dataclass(frozen=True, slots=True)
class RolloutPhase:
    """A time span from the start of a round until every replica is quiet, and its engine calls."""

    start: float
    """unix seconds"""
    end: float
    calls: tuple[EngineCall, ...] = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def decoded_tokens(self) -> int:
        return sum(call.tokens for call in self.calls)
