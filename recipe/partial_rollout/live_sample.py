"""A training sample in its worker: what its engine calls have made, where it runs, what the manager knows of it."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from recipe.partial_rollout.types import Segment


class SlotKeeper(Protocol):
    """What a running sample asks of its worker."""

    def engine_call(self, sample: LiveSample) -> AbstractAsyncContextManager[None]:
        """Entered once the sample holds a slot in an open round; left when the replica has answered."""
        ...

    def hand_in(self, sample: LiveSample) -> None:
        """Give the slot back, with whatever the manager does not know of the sample."""
        ...

    def note(self, sample: LiveSample) -> None:
        """Tell the manager what it does not know of the sample, which keeps its slot."""
        ...


@dataclass(slots=True)
class LiveSample:
    """A training sample in its worker."""

    id: str
    keeper: SlotKeeper
    priority: int
    restored: deque[Segment] = field(default_factory=deque)
    """journal of a life that has ended (crash, dead worker, retry): calls answer from it first"""
    restored_tools: dict[int, dict[str, Any]] = field(default_factory=dict)
    """likewise, results of finished tool calls by their number"""
    segments: list[Segment] = field(default_factory=list)
    """every engine call so far, in order, those of the journal included"""
    tool_calls: int = 0
    calls: int = 0
    replica: str | None = None
    """where its last call ran, if its prefix is cached there"""
    resumes: bool = False
    """its last call was interrupted: the next one may run elsewhere"""
    _unsent: list[Segment] = field(default_factory=list)
    _unsent_tools: list[dict[str, Any]] = field(default_factory=list)

    def add(self, segment: Segment) -> None:
        """Tokens that the engine has just made."""
        self.segments.append(segment)
        self._unsent.append(segment)

    def add_tool_result(self, result: dict[str, Any]) -> None:
        """A tool call that has just finished; the manager is told, so that it is not made twice."""
        self._unsent_tools.append(result)
        self.keeper.note(self)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent or self._unsent_tools)

    def take_unsent(self) -> tuple[tuple[Segment, ...], tuple[dict[str, Any], ...]]:
        """Segments and tool results since the last time this was asked."""
        unsent = tuple(self._unsent), tuple(self._unsent_tools)
        self._unsent, self._unsent_tools = [], []
        return unsent

    def replay_turn(self) -> list[Segment]:
        """The journal's segments of one turn; the last has a stop reason if the turn had come to its end."""
        turn: list[Segment] = []
        while self.restored and (not turn or turn[-1].stop_reason is None):
            turn.append(self.restored.popleft())
        self.segments.extend(turn)
        return turn


LIVE_SAMPLE: ContextVar[LiveSample | None] = ContextVar("live_sample", default=None)
