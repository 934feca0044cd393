"""Waits with deadlines, and errors in one line: used in every process."""

from __future__ import annotations

import asyncio
import re
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

T = TypeVar("T")

_ACTOR = re.compile(r"^\s*class_name: (?:\S*\.)?(?P<name>\w+)$.*?^\s*pid: (?P<pid>\d+)$", re.MULTILINE | re.DOTALL)
"""finds class and process id of a dead actor in Ray's message, which has a line for each"""


def one_line(error: BaseException | None) -> str:
    """Type and last line of ``error``; Ray puts a remote traceback before that line. A dead actor is named.

    An exception group is described by its first error. The error may be a user's, whose ``__str__`` may itself raise.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(traceback.TracebackException(type(error), error, None))  # type: ignore[arg-type]
    text = text.encode(errors="replace").decode()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # OmegaConf names the key in its first line.
    while len(lines) > 1 and lines[-1].startswith(("full_key:", "reference_type=", "object_type=")):
        lines.pop()
    message = lines[-1] if lines else "(no message)"
    if isinstance(error, RayActorError) and (found := _ACTOR.search(text)):
        message = f"{found['name']} (pid {found['pid']}): {message}"
    return f"{type(error).__name__}: {message}"


ERROR_LOG = "error.log"
"""file of the run directory with the traceback of a training that failed"""
_FRAME = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+)', re.MULTILINE)
_CHAINED = re.compile(r"^(?:The above exception was the direct cause|During handling of the above)", re.MULTILINE)
_NOT_THE_USERS = re.compile(r"site-packages|/lib/python|^<|recipe/partial_rollout/worker/|verl_ext/")


@dataclass(frozen=True, slots=True)
class ErrorText:
    """An error as it leaves its process: as text, since neither its class nor its frames need exist elsewhere."""

    line: str
    """type and message"""
    where: str
    """``FILE:LINE`` where its first cause was raised, in the user's code if it passed through any"""
    traceback: str

    @classmethod
    def from_error(cls, error: BaseException) -> ErrorText:
        text = "".join(traceback.format_exception(error)).encode(errors="replace").decode()
        # Python prints the first cause first.
        frames = [f"{found['file']}:{found['line']}" for found in _FRAME.finditer(_CHAINED.split(text, maxsplit=1)[0])]
        users = [frame for frame in frames if not _NOT_THE_USERS.search(frame)]
        return cls(one_line(error), (users or frames or ["?"])[-1], text)

    @property
    def kind(self) -> tuple[str, str]:
        """Type and place. Only the first error of a kind is reported.

        >>> ErrorText("KeyError: 'a'", "loop.py:7", "").kind
        ('KeyError', 'loop.py:7')
        """
        return self.line.partition(":")[0], self.where


class InfraError(RuntimeError):
    """A part of the machinery is lost for good: no sample caused it and no retry helps, so the run ends."""


AGAIN_S = 0.5
"""seconds until an actor that Ray cannot reach is asked again"""
START_S = 1200.0
"""seconds in which the replacement of a dead worker or replica must be ready; vLLM may load and compile for many
minutes"""


def is_out_of_reach(error: BaseException | None) -> bool:
    """Whether ``error`` says that Ray has lost its connection to an actor that may still be alive.

    Ray finds out within seconds: the next call is answered, or fails because the actor is dead.
    """
    return isinstance(error, ActorUnavailableError) and not isinstance(error, RayTaskError)


def means_death(error: BaseException) -> bool:
    """Whether ``error`` says that an actor, or the engine of a replica, has died."""
    died = isinstance(error, RayActorError) and not is_out_of_reach(error)
    return died or "EngineDead" in f"{type(error).__name__} {error}"


async def answer_of(ask: Callable[[], Awaitable[T]]) -> T:
    """Await ``ask()``, a call of an actor.

    Call it again while Ray cannot reach the actor. The caller sets the deadline.
    """
    while True:
        try:
            return await ask()
        except ActorUnavailableError as error:
            if not is_out_of_reach(error):
                raise
        await asyncio.sleep(AGAIN_S)


class NoAnswerError(TimeoutError):
    """A wait passed its deadline."""


def is_cancelled() -> bool:
    """Whether the current task is being cancelled.

    A ``CancelledError`` may also come from a library that cancelled its own task.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def result_of(ref: Awaitable[T]) -> T:
    """Await ``ref``, such as a Ray reference; wraps it in a coroutine."""
    return await ref


async def wait(
    awaitable: Awaitable[T],
    deadline_s: float | None,
    what: str,
    key: str | None = None,
    *,
    watches: Iterable[Coroutine[Any, Any, Any]] = (),
) -> T:
    """Return ``awaitable``'s result. However the wait ends, ``awaitable`` and ``watches`` are then cancelled.

    Args:
        deadline_s: seconds; None: no limit, because ``awaitable`` has deadlines of its own.
        what: name of ``awaitable``, for the error.
        key: key of ``partial_rollout.deadlines`` that sets the deadline, for the error; None: no key does.
        watches: coroutines that run during the wait. Each runs for ever, or ends the wait with the error that it
        raises.

    Raises:
        NoAnswerError: there is no result within ``deadline_s``.
    """
    # As a task: if the caller is cancelled, a ``gather`` that nobody asks any more would print a traceback.
    main, *watching = tasks = [asyncio.ensure_future(each) for each in (result_of(awaitable), *watches)]
    for task in tasks:
        # Of two that fail at once one is reported; asyncio would print the other.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        ended, _ = await asyncio.wait(tasks, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        if watching:
            # A watch in ``whole`` ends later than it is cancelled.
            await asyncio.wait(watching)
    if not ended:
        named = f" (partial_rollout.deadlines.{key})" if key else ""
        raise NoAnswerError(f"{what} took more than {deadline_s:g} s{named}")
    return (main if main in ended else ended.pop()).result()


async def in_thread(call: Callable[[], T]) -> T:
    """Run ``call`` in a thread. If a deadline gives it up, the thread does not keep the process alive."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


async def whole(awaitable: Awaitable[T]) -> T:
    """Return ``awaitable``'s result.

    If the caller is cancelled, wait for the result all the same, then raise the cancellation.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
