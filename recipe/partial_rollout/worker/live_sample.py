"""A training sample in its worker: its engine calls and their tokens, its slot, its replica, its clock and its tools.

Each tool call has a deadline. A call that exceeds it is cancelled, and its sample fails even if the agent loop catches
tool errors: agent loops pass a tool's exception to the model as its answer. A synchronous tool function cannot be
cancelled. It runs in a thread until it returns, and no other call waits for it. A coroutine that blocks the event loop
stops the whole worker, which only ``deadlines.stall_s`` detects. Everything else is as in verl: an agent loop creates,
calls and releases its tools, and a retry of the sample starts with new ones.
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
"""seconds that an agent loop has for its cleanup after it was cancelled"""


class SampleClock:
    """Limits the time between two engine calls of an agent loop: a hung tool fails its sample and does not stall the
    run.

    The clock counts the time in tools, in environments and in the loop's own code. It is stopped while the sample waits
    for its slot, the engine or its reward, which have deadlines of their own. After each engine call it starts from 0.

    Args:
        name: the sample or validation row in error messages, e.g. "sample 0/3#1".
        deadline_s: most seconds between two engine calls (``failures.sample_timeout_s``); None: no limit.
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
            Exception: the error given to ``end``, or the agent loop's own.
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
            # Also if this call itself is cancelled: no agent loop may run on when nobody awaits it.
            self._timeout = None
            task.cancel()
        if late or self._error is not None:
            raise self._error or TimeoutError(
                f"the agent loop of {self.name} made no engine call for {self._deadline_s:g} s and was cancelled: its "
                f"code or a tool hangs, or needs a larger limit (partial_rollout.failures.sample_timeout_s)"
            ) from where
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Exception):
            # A SystemExit that leaves this coroutine would end more than its sample.
            raise RuntimeError(
                f"the agent loop of {self.name} tried to end its process: {type(error).__name__}: {error}"
            ) from error
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
        """Cancel the agent loop and have ``run`` raise ``error``, which the agent loop therefore cannot catch."""
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

    Return None if the task caught the cancellation. It may run on then, and nobody uses its result.
    """
    task.cancel()
    await asyncio.wait({task}, timeout=_END_S)
    try:
        return task.exception() if task.done() else None
    except asyncio.CancelledError as cancelled:
        return cancelled


def context_hash(tokens: np.ndarray | None = None) -> hashlib.blake2b:
    """Return a blake2b hash object of int32 ``tokens``; its ``update`` adds the bytes of further tokens."""
    return hashlib.blake2b(b"" if tokens is None else tokens.tobytes(), digest_size=16)


def digest_of(context: bytes, sampling_params: Mapping[str, Any]) -> str:
    """Hash a request: ``context`` (the joined digests of its prompt and images) and its sampling parameters."""
    params = repr(sorted(sampling_params.items()))
    return hashlib.blake2b(context + params.encode(), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class ReplicaAffinity:
    """The replica that the next call of an agent loop prefers, because the loop's context is cached there."""

    replica: str | None = None
    """address of the replica of the agent loop's last call; None before that, or if its context is no longer cached
    there"""
    resumes: bool = False
    """whether its last call was interrupted, so that the next one may run elsewhere"""


@dataclass(slots=True)
class Request:
    """A call to a replica."""

    affinity: ReplicaAffinity
    """the agent loop's, which the call updates"""
    sample: LiveSample | None = None
    """None in validation and under noPR"""
    resumed_tokens: int = 0
    """tokens of the prompt that an engine has read or made before"""
    waited_s: float = 0.0
    """seconds before the call that the sample waited for a slot in an open round"""
    address: str = ""


@dataclass(slots=True, eq=False)
class Turn:
    """One answer of the engine to an agent loop: one call, or several if it was interrupted."""

    number: int
    """index of the turn in its sample, in the order of their start; 0 is kept for the turn whose tokens the lease has
    """
    start: int
    """number of tokens in its prompt"""
    context: bytes
    """digest of its prompt (``context_hash``)"""
    request_digest: str
    """``digest_of`` prompt and sampling parameters"""
    segments: list[Segment]
    unlike: str = ""
    """"top_p=0.7": sampling parameter because of which its tokens cannot be trained (``unlike_training``); "" if none
    """
    images: tuple[bytes, ...] = ()
    """digests of the images that its prompt shows"""

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    @property
    def complete(self) -> bool:
        """Whether the engine's answer is complete. An abandoned call never is, and its tokens are not trained."""
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
    """the lease with which the sample came to this worker"""
    clock: SampleClock
    """limits the time that its agent loop spends between two engine calls"""
    turns: list[Turn] = field(default_factory=list)
    """in the order in which they began; some may run concurrently"""
    leased: asyncio.Event = field(default_factory=asyncio.Event)
    """set while it holds a slot; only ``ClaimLoop`` writes this field and the next four"""
    slot_requested: bool = False
    """whether it has asked for a slot that is not granted yet; a sample that neither holds nor asks for one is PARKED
    """
    calling: int = 0
    """engine calls that run or wait for the slot, which they share"""
    release_timer: asyncio.TimerHandle | None = None
    """releases the slot when it fires, unless an engine call is under way then"""
    task: asyncio.Task[None] | None = None
    """runs its agent loop; kept here because asyncio keeps no reference to a task"""
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
        """Segments that came with the lease and that no turn has taken up yet; empty for a conversation."""
        return () if any(turn.number == 0 for turn in self.turns) else self.lease.segments

    @property
    def decoded(self) -> int:
        """Tokens that engines made for the sample, those that came with its lease from an earlier worker included."""
        return sum(map(len, [*self.segments, *self._known]))

    @property
    def first_version(self) -> int | None:
        """Policy version of the sample's first token; None if there is no token yet, or if the replica did not say."""
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
        """Begin a turn whose prompt has ``start`` tokens.

        The lease may bring the first turn's tokens from a worker that died. A turn with the same request (prompt and
        sampling parameters) continues from them. Any other turn starts without tokens.
        """
        # Number 0 is kept for the turn whose tokens are known.
        known = self._known
        turn = Turn(len(self.turns) + bool(known), start, context, request_digest, [], unlike, images)
        if known and known[0].request_digest == request_digest:
            turn.number, turn.segments = 0, list(known)
        self.turns.append(turn)
        return turn

    def add(self, turn: Turn, segment: Segment) -> None:
        """Append ``segment`` to ``turn``, and to the segments that the next report tells the manager.

        Do nothing if the sample has ended, or if the segment is empty because its call was aborted before the first
        token.
        """
        if self.ended or (not len(segment) and segment.stop_reason is None):
            return
        segment = replace(segment, turn=turn.number, request_digest=turn.request_digest)
        turn.segments.append(segment)
        self.unsent.append(segment)


class OneOfASample:
    """Base of objects that a sample has once, and whose methods run in the event loop that made the object.

    An agent loop that forks may copy its attributes; a copy of such an object is the object itself.
    """

    _home: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        # ``TimedTool`` passes on what is assigned to it.
        vars(self)["_home"] = asyncio.get_running_loop()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def at_home(verb: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    """Decorate ``verb``, a method of a ``OneOfASample``, to run in the object's event loop, wherever it is called.

    Parts of an agent loop may run in threads that have event loops of their own.
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
    """Wrap ``tools`` for one agent loop: each call has a deadline, and errors that a tool raises are recorded.

    ``tools`` are as verl loads them (``load_all_tools``). The loop may call them in any thread.

    Args:
        clock: the agent loop's clock, through which a call that exceeds ``timeout_s`` ends the agent loop.
        timeout_s: limit of one call, in seconds; None: no limit.
        record_error: called with each error that a tool raises; verl's tool loop shows it only to the model.
    """
    return [TimedTool(tool, clock, timeout_s, record_error) for tool in tools]


class TimedTool(OneOfASample):
    """Stands for a tool, and gives each call of it a deadline.

    Everything else is the tool's own: its class to ``isinstance``, its attributes, and those that a loop sets.
    """

    def __init__(
        self, tool: Any, clock: SampleClock, timeout_s: float | None, record_error: Callable[[Exception], Any]
    ) -> None:
        super().__init__()
        # An attribute that is assigned becomes the tool's.
        vars(self).update(
            _tool=tool,
            _clock=clock,
            _timeout_s=timeout_s,
            _record_error=record_error,
            # The coroutines that verl's tool loop awaits.
            _verbs=("call",) if isinstance(tool, FunctionTool) else ("create", "execute", "release"),
        )

    @at_home
    async def within(self, call: Awaitable[T]) -> T:
        """Return ``call``'s result.

        Raises:
            TimeoutError: ``call`` took longer than the limit; the agent loop ends with this error, too.
            Exception: the tool's own error, which is also recorded.
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
                f"tool {self._tool.name} gave no answer to {self._clock.name} within {self._timeout_s:g} s: it hangs, "
                f"or needs a larger limit (partial_rollout.failures.tool_timeout_s)"
            )
            # The agent loop may turn the error into a message to the model, so its clock ends the agent loop as well.
            self._clock.end(late)
            raise late from error

    @property
    def __class__(self) -> type:
        """The tool's; verl's loop tells a function from a tool with a life cycle by it."""
        return type(self._tool)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tool, name, value)

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._tool, name)
        return (lambda *args, **kwargs: self.within(own(*args, **kwargs))) if name in self._verbs else own
