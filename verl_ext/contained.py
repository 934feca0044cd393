"""Errors that end more than their own call become RuntimeErrors: what an event loop runs is users' code.

A task that raises SystemExit or KeyboardInterrupt ends its event loop, and with it a Ray actor. A future refuses
StopIteration, so whoever awaits a thread that raised it waits for ever.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_THREADS = 2**20
"""most threads of a pool, which starts them on demand: a carried sample may keep a thread over rounds, and a call that
hangs keeps one for ever"""
_EXITS = (SystemExit, KeyboardInterrupt)
THREADED: dict[Future[Any], asyncio.Task[Any]] = {}
"""calls that run in this process's ``Threads``, each with the task that made it; one may outlive its task"""


def contain(loop: asyncio.AbstractEventLoop) -> None:
    """Contain the errors of ``loop``'s tasks and threads, and give each call of its default executor a thread."""
    if loop.get_task_factory() is not _task:
        loop.set_task_factory(_task)
        loop.set_default_executor(Threads(_THREADS))


async def contained(work: Awaitable[T], errors: Any = BaseException) -> T:
    """Return ``work``'s result. Of ``errors``, raise those that are no Exception as RuntimeError; not a cancellation."""
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except errors as error:
        raise _ordinary(error) from error


class Threads(ThreadPoolExecutor):
    """Raises StopIteration, and every error that is no Exception, as RuntimeError."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def call() -> Any:
            try:
                return fn(*args, **kwargs)
            except BaseException as error:
                if isinstance(error, Exception) and not isinstance(error, StopIteration):
                    raise
                raise _ordinary(error) from error

        future = super().submit(call)
        # Without an event loop there is no task.
        with suppress(RuntimeError):
            if task := asyncio.current_task():
                THREADED[future] = task
                future.add_done_callback(THREADED.pop)
        return future


def _ordinary(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}: {error}")


def _task(loop: asyncio.AbstractEventLoop, work: Any, **how: Any) -> asyncio.Task[Any]:
    """Task factory of an event loop."""
    # Other errors keep their types for the code that awaits the task.
    task = asyncio.Task(contained(work, _EXITS), loop=loop, **how)
    # Python warns of work that was never awaited: a task may be cancelled before it begins.
    task.add_done_callback(lambda _: work.close())
    return task
