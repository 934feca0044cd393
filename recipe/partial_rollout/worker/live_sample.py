"""A training sample in its worker: the tokens of its engine calls, its replica, its clock, what the manager knows of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import InitVar, dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from recipe.partial_rollout.manager.types import Segment

T = TypeVar("T")


class SampleTimeoutError(TimeoutError):
    """An agent loop made no engine call for too long."""


class SampleClock:
    """The time that a sample's agent loop spends between engine calls, so that a hung tool ends its sample, not the run.

    It runs in tools, in environments and in the loop's own code, and stops while something else has a deadline: while the
    sample waits for its slot, the engine or its reward. Each engine call starts it anew.

    Args:
        sample_id: for the error.
        deadline_s: seconds between two engine calls (``partial_rollout.failures.sample_timeout_s``); None: no deadline.
    """

    def __init__(self, sample_id: str, deadline_s: float | None = None) -> None:
        self._sample_id = sample_id
        self._deadline_s = deadline_s
        self._timeout: asyncio.Timeout | None = None
        self._stops = 0
        self._error: Exception | None = None

    async def run(self, agent_loop: Awaitable[T]) -> T:
        """``agent_loop``'s result.

        Raises:
            SampleTimeoutError: the clock ran for longer than its deadline.
            Exception: the one given to ``end``.
        """
        limit = asyncio.timeout(self._deadline_s)
        try:
            async with limit as self._timeout:
                output = await agent_loop
        except TimeoutError as error:
            if error is self._error or not limit.expired():
                raise
            raise self._error or SampleTimeoutError(
                f"the agent loop of sample {self._sample_id} made no engine call for {self._deadline_s:g} s "
                f"(partial_rollout.failures.sample_timeout_s)"
            ) from error
        finally:
            self._timeout = None
        if self._error is not None:
            # An agent loop may also catch its cancellation.
            raise self._error
        return output

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock while entered; it restarts afterwards. Calls may overlap."""
        self._stops += 1
        self._set(None)
        try:
            yield
        finally:
            self._stops -= 1
            if not self._stops:
                self._set(self._deadline_s)

    def end(self, error: Exception) -> None:
        """Cancel the agent loop and have ``run`` raise ``error``: an agent loop may catch what its tools raise."""
        self._error = self._error or error
        self._set(0.0)

    def _set(self, seconds: float | None) -> None:
        if self._timeout is None or self._timeout.expired():
            return
        if self._error is not None:
            seconds = 0.0
        self._timeout.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)


class SlotKeeper(Protocol):
    """The services that a running sample needs from its worker."""

    def engine_call(self, sample: LiveSample) -> AbstractAsyncContextManager[None]:
        """Entered once the sample holds a slot in an open round; left when the replica has answered."""
        ...

    def release_slot(self, sample: LiveSample) -> None:
        """Give the slot back, and report what the manager does not know about the sample."""
        ...

    def report_now(self, sample: LiveSample) -> None:
        """Report what the manager does not know about the sample, which keeps its slot."""
        ...

    def note_error(self, error: Exception) -> None:
        """Report an error that fails no sample: a tool's, which is its answer."""
        ...

    def leave(self, sample: LiveSample) -> None:
        """As ``release_slot``, for a sample that goes on without an engine; nothing if it has no slot, or uses it."""
        ...

    async def tell(self, sample: LiveSample) -> None:
        """As ``report_now``; returns once the manager knows."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the engine to an agent loop: one call, or several if it was interrupted."""

    start: int
    """tokens of the conversation before it"""
    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [length]"""
        return np.concatenate([segment.token_ids for segment in self.segments] or [np.empty(0, np.int32)])

    @property
    def log_probs(self) -> np.ndarray:
        """float32 [length]"""
        return np.concatenate([segment.log_probs for segment in self.segments] or [np.empty(0, np.float32)])

    @property
    def versions(self) -> np.ndarray:
        """int32 [length]"""
        parts = [np.full(len(segment), segment.version, np.int32) for segment in self.segments]
        return np.concatenate(parts or [np.empty(0, np.int32)])


@dataclass(slots=True)
class ToolState:
    """What is known of the state that one tool keeps for a sample (``tool_journal``)."""

    handle: Any = None
    """the last that was journaled; None: before any call"""
    in_place: bool = False
    """whether the tool is in it, or has gone on from there"""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """held by the call that may change it"""


@dataclass(slots=True, eq=False)
class LiveSample:
    """A training sample in its worker."""

    id: str
    keeper: SlotKeeper
    priority: int
    group: str = ""
    """uid of its group; its own id if it has none (the probe)"""
    restored: deque[Segment] = field(default_factory=deque)
    """journal from before a crash, a worker's death or a retry; engine calls are answered from it first"""
    restored_tools: dict[int, dict[str, Any]] = field(default_factory=dict)
    """the same for tools: results of finished calls by their number, and the starts of unfinished ones"""
    tool_states: defaultdict[str, ToolState] = field(default_factory=lambda: defaultdict(ToolState))
    """by tool"""
    segments: list[Segment] = field(default_factory=list)
    """every engine call so far, in order, including those of the journal"""
    turn_starts: list[tuple[int, int]] = field(default_factory=list)
    """for each turn: number of conversation tokens and of segments before it"""
    tool_calls: int = 0
    calls_replayed: int = 0
    """of ``tool_calls``, those that the journal answered"""
    calls_asked: int = 0
    """of ``tool_calls``, those whose outcome the tool's ``status`` was asked for"""
    calls: int = 0
    replica: str | None = None
    """address of the replica of its last call, if its prefix is cached there"""
    resumes: bool = False
    """whether its last call was interrupted, so that the next one may run elsewhere"""
    engine_calls: int = 0
    """that run or wait for the slot"""
    clock: SampleClock = field(init=False)
    """seconds that its agent loop spends between engine calls"""
    deadline_s: InitVar[float | None] = None
    """deadline of ``clock``"""
    _unsent: list[Segment] = field(default_factory=list)
    _unsent_tools: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self, deadline_s: float | None) -> None:
        self.group = self.group or self.id
        self.clock = SampleClock(self.id, deadline_s)

    @property
    def first_version(self) -> int | None:
        """Policy version of its first token; None if there is none yet, or if the replica did not say."""
        return self.segments[0].version if self.segments and self.segments[0].version >= 0 else None

    def add(self, segment: Segment) -> None:
        """Add tokens that the engine has just made."""
        self.segments.append(segment)
        self._unsent.append(segment)

    def add_tool_result(self, result: dict[str, Any]) -> None:
        """Add a tool call that has just finished, and report it, so that it is not made twice."""
        self._unsent_tools.append(result)
        self.keeper.report_now(self)

    async def start_tool_call(self, start: dict[str, Any]) -> None:
        """Add a tool call that must not be made twice, before it is made; returns once the manager knows it."""
        self._unsent_tools.append(start)
        await self.keeper.tell(self)

    @contextmanager
    def away_after(self, seconds: float) -> Iterator[None]:
        """Its slot goes to another once what it awaits inside, a tool or its reward, has taken ``seconds``."""
        late = asyncio.get_running_loop().call_later(seconds, self.keeper.leave, self)
        try:
            yield
        finally:
            late.cancel()

    def take_unsent(self) -> tuple[tuple[Segment, ...], tuple[dict[str, Any], ...]]:
        """Segments and tool results added since the last call."""
        unsent = tuple(self._unsent), tuple(self._unsent_tools)
        self._unsent, self._unsent_tools = [], []
        return unsent

    @property
    def turns(self) -> list[Turn]:
        """The engine's answers, turn by turn."""
        bounds = [*self.turn_starts, (0, len(self.segments))]
        return [
            Turn(start, tuple(self.segments[first:last])) for (start, first), (_, last) in itertools.pairwise(bounds)
        ]

    @property
    def conversation_tokens(self) -> int:
        """Of its turns so far and all before them; 0 before the first."""
        return self.turns[-1].start + len(self.turns[-1]) if self.turn_starts else 0

    def start_turn(self, context_length: int) -> list[Segment]:
        """Begin a turn after ``context_length`` tokens of conversation; returns the journal's segments of it.

        The last segment has a stop reason if the turn was complete.
        """
        self.turn_starts.append((context_length, len(self.segments)))
        turn: list[Segment] = []
        while self.restored and (not turn or turn[-1].stop_reason is None):
            turn.append(self.restored.popleft())
        self.segments.extend(turn)
        return turn


LIVE_SAMPLE: ContextVar[LiveSample | None] = ContextVar("live_sample", default=None)


class ProbeEndedError(Exception):
    """The replicas were paused, so a sample of the probe ends."""


class ProbeSlots:
    """The ``SlotKeeper`` of probe samples: a slot is always granted and never given back."""

    @contextlib.asynccontextmanager
    async def engine_call(self, sample: LiveSample) -> AsyncIterator[None]:
        yield

    def release_slot(self, sample: LiveSample) -> None:
        raise ProbeEndedError(sample.id)

    def report_now(self, sample: LiveSample) -> None:
        """Do nothing: nobody needs to know."""

    def note_error(self, error: Exception) -> None:
        """Do nothing, as ``report_now``."""

    def leave(self, sample: LiveSample) -> None:
        """Do nothing, as ``report_now``."""

    async def tell(self, sample: LiveSample) -> None:
        """Do nothing, as ``report_now``."""
