"""A training sample in its worker: its engine calls and their tokens, its slot, its replica, its clock and its tools.

Each call of a tool has a deadline, whatever its agent loop makes of tool errors. A call that takes too long ends its
sample. To raise inside the tool would not do: agent loops turn a tool's exception into its answer, and a tool that hangs
has given none. The call is cancelled if possible. A synchronous function runs in a thread, which continues until the
function returns; no other call waits for it. A coroutine that blocks the event loop stops its worker, and only
``deadlines.stall_s`` detects that. All else is verl's: a tool is created, called and released as its agent loop asks, and
anew in each life of a sample.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
from verl.tools.function_tool import FunctionTool

from recipe.partial_rollout.manager.types import Lease, Segment

T = TypeVar("T")

_END_S = 5.0
"""seconds that an agent loop has to clean up after its time"""


class SampleClock:
    """The time that a sample's agent loop spends between engine calls, so that a hung tool ends its sample, not the run.

    It runs in tools, in environments and in the loop's own code, and stops while something else has a deadline: while the
    sample waits for its slot, the engine or its reward. Each engine call starts it anew.

    Args:
        name: of the sample, for the error.
        deadline_s: seconds between two engine calls (``partial_rollout.failures.sample_timeout_s``); None: no deadline.
    """

    def __init__(self, name: str, deadline_s: float | None = None) -> None:
        self.name = name
        self._deadline_s = deadline_s
        self._timeout: asyncio.Timeout | None = None
        self._stops = 0
        self._error: Exception | None = None

    async def run(self, agent_loop: Awaitable[T]) -> T:
        """Return ``agent_loop``'s result.

        Raises:
            TimeoutError: the clock ran for longer than its deadline.
            Exception: the one given to ``end``.
        """
        task = asyncio.ensure_future(agent_loop)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._deadline_s) as self._timeout:
                    # Waited for, not awaited: a TimeoutError of the loop's own does not mean that its time is over.
                    await asyncio.wait({task})
            late = not task.done()
            where = await _cancelled(task) if late else None
        finally:
            # Also where this call is cancelled itself: no agent loop runs on unheard.
            self._timeout = None
            task.cancel()
        if late or self._error is not None:
            raise self._error or TimeoutError(
                f"the agent loop of {self.name} made no engine call for {self._deadline_s:g} s "
                f"(partial_rollout.failures.sample_timeout_s)"
            ) from where
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Exception):
            # Let out of the event loop, or of what runs here, it would end more than its sample.
            raise RuntimeError(f"the agent loop of {self.name} raises {type(error).__name__}: {error}") from error
        return task.result()

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
        # A call that the loop left behind may end after it, and an expired timeout cannot be rescheduled.
        if self._timeout is None or self._timeout.expired():
            return
        if self._error is not None:
            seconds = 0.0
        self._timeout.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)


async def _cancelled(task: asyncio.Future[Any]) -> BaseException | None:
    """Cancel ``task``, wait ``_END_S`` seconds at most, and return its error, whose traceback shows where it was.

    None: the task caught the cancellation. It may run on; its result is not used.
    """
    task.cancel()
    await asyncio.wait({task}, timeout=_END_S)
    try:
        return task.exception() if task.done() else None
    except asyncio.CancelledError as cancelled:
        return cancelled


def context_hash(tokens: np.ndarray | None = None) -> hashlib.blake2b:
    """Hash a context of int32 tokens; ``update`` adds more."""
    return hashlib.blake2b(b"" if tokens is None else tokens.tobytes(), digest_size=16)


def digest_of(context: bytes, sampling_params: Mapping[str, Any]) -> str:
    """Hash a request: ``context`` (the joined digests of its prompt and images) and its sampling parameters."""
    params = repr(sorted(sampling_params.items()))
    return hashlib.blake2b(context + params.encode(), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class ReplicaAffinity:
    """The replica that the next call of an agent loop prefers, because the loop's context is cached there."""

    replica: str | None = None
    """address of the replica of its last call, if its prefix is cached there"""
    resumes: bool = False
    """whether its last call was interrupted, so that the next one may run elsewhere"""


@dataclass(slots=True)
class Request:
    """A call to a replica."""

    affinity: ReplicaAffinity
    """of its agent loop"""
    sample: LiveSample | None = None
    """None: it is no training sample's"""
    resumed_tokens: int = 0
    """tokens of the prompt that an engine has read or made before"""
    waited_s: float = 0.0
    """see ``EngineCall``"""
    address: str = ""


@dataclass(slots=True, eq=False)
class Turn:
    """One answer of the engine to an agent loop: one call, or several if it was interrupted."""

    number: int
    """in its sample, by the order in which they began"""
    start: int
    """tokens of its prompt"""
    context: bytes
    """digest of its prompt (``context_hash``)"""
    request_digest: str
    """``digest_of`` prompt and sampling parameters"""
    segments: list[Segment]
    unlike: str = ""
    """sampling parameter that keeps its tokens from being trained (``llm_client.unlike_training``); "" if none does"""
    images: tuple[bytes, ...] = ()
    """digests of the images that its prompt shows"""

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    @property
    def complete(self) -> bool:
        """Whether it is answered; a call that its loop gave up never is, and is not trained."""
        return bool(self.segments) and self.segments[-1].stop_reason is not None

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [length]"""
        return np.concatenate([segment.token_ids for segment in self.segments])

    @property
    def log_probs(self) -> np.ndarray:
        """float32 [length]"""
        return np.concatenate([segment.log_probs for segment in self.segments])

    @property
    def versions(self) -> np.ndarray:
        """int32 [length]; policy version that made each token"""
        return np.concatenate([np.full(len(segment), segment.version, np.int32) for segment in self.segments])


@dataclass(slots=True, eq=False)
class LiveSample:
    """A training sample in its worker."""

    lease: Lease
    """with which it came here"""
    clock: SampleClock
    """seconds that its agent loop spends between engine calls"""
    turns: list[Turn] = field(default_factory=list)
    """in the order in which they began; some may run concurrently"""
    leased: asyncio.Event = field(default_factory=asyncio.Event)
    """set while it holds a slot; written by ``ClaimLoop`` alone, as are the next four"""
    slot_requested: bool = False
    """whether it has asked for a slot that is not granted yet; a sample that neither has nor asked for one is away"""
    calling: int = 0
    """engine calls that run or wait for the slot, which they share"""
    release_timer: asyncio.TimerHandle | None = None
    """gives the slot to another sample, if no engine call comes first"""
    task: asyncio.Task[None] | None = None
    """runs its agent loop; asyncio itself keeps no task alive"""
    ended: bool = False
    """whether its agent loop has ended; nothing that it left behind is reported"""
    affinity: ReplicaAffinity = field(default_factory=ReplicaAffinity)
    unsent: list[Segment] = field(default_factory=list)
    """segments that the manager does not know"""

    @property
    def id(self) -> str:
        return self.lease.sample_id

    @property
    def segments(self) -> list[Segment]:
        """Segments of the turns that have begun, in their order."""
        return [segment for turn in self.turns for segment in turn.segments]

    @property
    def _known(self) -> tuple[Segment, ...]:
        """First turn of a single-turn sample that goes on from its tokens, until a call asks for it."""
        return () if any(turn.number == 0 for turn in self.turns) else self.lease.segments

    @property
    def decoded(self) -> int:
        """Tokens that engines made for the sample, those that came with its lease from an earlier worker included."""
        return sum(map(len, [*self.segments, *self._known]))

    @property
    def first_version(self) -> int | None:
        """Policy version of its first token; None if there is none yet, or if the replica did not say."""
        first = min((segment.version for segment in self.segments), default=-1)
        return first if first >= 0 else None

    def start_turn(
        self,
        start: int,
        context: bytes = b"",
        request_digest: str = "",
        unlike: str = "",
        images: tuple[bytes, ...] = (),
    ) -> Turn:
        """Begin a turn after ``start`` tokens.

        The lease may have tokens of the sample's first turn. A call with the same request (prompt and sampling parameters)
        continues from these tokens. Any other call starts without them.
        """
        # Number 0 is kept for the turn whose tokens are known.
        known = self._known
        turn = Turn(len(self.turns) + bool(known), start, context, request_digest, [], unlike, images)
        if known and known[0].request_digest == request_digest:
            turn.number, turn.segments = 0, list(known)
        self.turns.append(turn)
        return turn

    def add(self, turn: Turn, segment: Segment) -> None:
        """Append ``segment`` to ``turn``, and to what the manager is told next.

        Nothing is added if the sample has ended, or if its engine call was aborted before the first token.
        """
        if self.ended or (not len(segment) and segment.stop_reason is None):
            return
        segment = replace(segment, turn=turn.number, request_digest=turn.request_digest)
        turn.segments.append(segment)
        self.unsent.append(segment)


class OneOfASample:
    """An object that a sample has once, and whose methods run in the event loop in which it was made.

    An agent that forks copies all its attributes; a copy of this is the object itself.
    """

    def __init__(self) -> None:
        self._home = asyncio.get_running_loop()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def at_home(verb: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    """Run ``verb``, a method of a ``OneOfASample``, in its event loop, from whichever thread and loop it is called.

    Agent loops may run their parts in threads, which have event loops of their own.
    """

    async def call(own: OneOfASample, *args: Any, **kwargs: Any) -> T:
        work = verb(own, *args, **kwargs)
        if asyncio.get_running_loop() is own._home:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, own._home))

    return call


# -- tools ---------------------------------------------------------------------------------------------------------------


def timed(
    tools: list[Any], clock: SampleClock, timeout_s: float | None, record_error: Callable[[Exception], Any]
) -> list[Any]:
    """Wrap ``tools`` for one agent loop: each call has a deadline, and what a tool raises is recorded.

    ``tools`` are as verl loads them (``load_all_tools``). The loop may call them in any thread.

    Args:
        clock: the agent loop's clock; a late call ends the agent loop through it.
        timeout_s: limit of one call, in seconds; None: no limit.
        record_error: called with what a tool raises, which verl's tool loop shows to the model alone.
    """
    return [_timed(tool, TimedTool(tool, clock, timeout_s, record_error)) for tool in tools]


def _timed(tool: Any, bounded: TimedTool) -> Any:
    if not isinstance(tool, FunctionTool):
        return bounded

    async def call(**parameters: Any) -> Any:
        return await bounded.within(tool.call(parameters))

    # verl's loop tells a function from a tool with a life cycle by its class.
    return replace(tool, fn=call, is_async=True)


class TimedTool(OneOfASample):
    """A tool each call of whose life cycle has a deadline (see ``timed``); everything else is the tool's own."""

    def __init__(
        self, tool: Any, clock: SampleClock, timeout_s: float | None, record_error: Callable[[Exception], Any]
    ) -> None:
        super().__init__()
        self._tool = tool
        self._clock = clock
        self._timeout_s = timeout_s
        self._record_error = record_error

    @at_home
    async def within(self, call: Awaitable[T]) -> T:
        """Return ``call``'s result.

        Raises:
            TimeoutError: there is none in time; the agent loop ends with it, too.
            Exception: the tool's own.
        """
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await call
        except Exception as error:
            # A tool may raise a TimeoutError of its own, which is an answer like any other.
            if not limit.expired():
                self._record_error(error)
                raise
            late = TimeoutError(
                f"tool {self._tool.name} gave no answer to {self._clock.name} within {self._timeout_s:g} s "
                f"(partial_rollout.failures.tool_timeout_s)"
            )
            # The agent loop may turn the error into a message to the model; its clock ends it all the same.
            self._clock.end(late)
            raise late from error

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._tool, name)
        # What verl's tool loop awaits in a tool's life.
        if name not in ("create", "execute", "release"):
            return own
        return lambda *args, **kwargs: self.within(own(*args, **kwargs))
