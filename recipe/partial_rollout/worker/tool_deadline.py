"""A deadline for each call of a tool, whatever its agent loop makes of tool errors.

A call that takes too long ends its sample. To raise inside the tool would not do: agent loops turn a tool's exception into
its answer, and a tool that hangs has given none. The call is cancelled if possible. A synchronous function runs in a
thread, which continues until the function returns; no other call waits for it. A coroutine that blocks the event loop stops
its worker, and only ``deadlines.stall_s`` detects that.

All else is verl's: a tool is created, called and released as its agent loop asks, and anew in each life of a sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from verl.tools.function_tool import FunctionTool

from recipe.partial_rollout.worker.live_sample import OneOfASample, SampleClock, at_home

T = TypeVar("T")


def timed(
    tools: list[Any], clock: SampleClock, timeout_s: float | None, record_error: Callable[[Exception], Any]
) -> list[Any]:
    """Return ``tools`` as verl loads them (``load_all_tools``) for one agent loop, in whatever thread it calls them.

    Args:
        clock: of the agent loop; it ends when a call is late.
        timeout_s: of a call; None: no limit.
        record_error: gets what a tool raises, which verl's tool loop shows to the model alone.
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
            if not limit.expired():
                self._record_error(error)
                raise
            late = TimeoutError(
                f"tool {self._tool.name} gave no answer to {self._clock.name} within {self._timeout_s:g} s "
                f"(partial_rollout.failures.tool_timeout_s)"
            )
            self._clock.end(late)
            raise late from error

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._tool, name)
        if name not in ("create", "execute", "release"):
            return own
        return lambda *args, **kwargs: self.within(own(*args, **kwargs))
