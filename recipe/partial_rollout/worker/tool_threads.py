"""Threads for synchronous tools, separate from the event loop's, so that a hung tool takes none from tokenizers or rewards.

A thread cannot be ended from outside. A call that is given up while it runs keeps its thread until it returns. So later
calls get a new pool, and the old pool ends with its calls.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class ToolThreads:
    """A pool of threads that is replaced when one of them is lost.

    Args:
        size: threads; None: as many as the event loop's own pool has.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = size
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="tool")

    async def run(self, call: Callable[[], T]) -> T:
        """``call``'s result, in a thread, with the caller's context variables (as ``asyncio.to_thread``)."""
        pool = self._pool
        running = pool.submit(contextvars.copy_context().run, call)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if running.running() and pool is self._pool:
                self._pool = ThreadPoolExecutor(self._size, thread_name_prefix="tool")
                pool.shutdown(wait=False)
            raise
