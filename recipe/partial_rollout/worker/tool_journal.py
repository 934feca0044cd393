"""Tools that are called once: the result of every finished call is journaled, and a replay returns it.

A sample whose worker died, or whose run crashed, replays its conversation from the start: engine calls are answered from
the journal (``PartialRolloutLLMClient``), and so are tool calls. The first call that is not in the journal is real.

Calls are numbered in the order in which the agent loop makes them, and a replay repeats that order: verl's
``ToolAgentLoop`` starts the parallel calls of a turn in order. What a tool keeps outside its result (a sandbox, files) is
not journaled: such a tool must be able to rebuild it in ``create``.

A call that takes too long ends its sample. (Raising inside the tool would not do: agent loops turn a tool's exception
into its answer, and a hung tool gave none.) The call is cancelled if possible. A synchronous function runs in a thread
(``ToolThreads``), which continues until the function returns. A coroutine that blocks the event loop stops its worker,
and only ``deadlines.stall_s`` detects that.

A call may have had its effect although it has no result: it ran out of time, its worker died, or the run resumes from a
checkpoint that was taken during the call. It is made again only if its tool allows it: ``repeatable = True`` as an
attribute of the ``BaseTool`` or of the function, or ``repeatable: true`` in the tool's ``config``. Any other tool's call
is journaled before it is made, once the manager has confirmed it. A replay answers such a call with an error, which
verl's tool loop shows to the model like any other error of a tool.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse

from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample

T = TypeVar("T")


class ToolThreads:
    """Threads for synchronous tools, apart from the event loop's, so that a hung tool takes none from tokenizers.

    A thread cannot be ended from outside: a call that is given up keeps its own until it returns. Later calls get a new
    pool, and the old one ends with its calls.

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


logger = logging.getLogger(__name__)

Result = tuple[ToolResponse, float | None, dict[str, Any]]


T = TypeVar("T")


class ToolError(RuntimeError):
    """A replayed tool call that failed the first time, or that was cut off."""


def repeatable(tool: Any) -> bool:
    """Whether a call of ``tool`` that was cut off may be made again; see the module."""
    if isinstance(tool, FunctionTool):
        return bool(getattr(tool.fn, "repeatable", False))
    return bool(getattr(tool, "repeatable", False) or (getattr(tool, "config", None) or {}).get("repeatable", False))


class ToolTimeoutError(TimeoutError):
    """A tool did not answer in time."""


def journaled(tools: list[Any], timeout_s: float | None = None) -> list[Any]:
    """``tools`` as verl loads them (``load_all_tools``), each with a journal and ``timeout_s`` for one call."""
    threads = ToolThreads()
    return [
        _journaled_function(tool, timeout_s, threads)
        if isinstance(tool, FunctionTool)
        else JournaledTool(tool, timeout_s)
        for tool in tools
    ]


def _journaled_function(tool: FunctionTool, timeout_s: float | None, threads: ToolThreads) -> FunctionTool:
    async def call(**parameters: Any) -> Result:
        async def run() -> Result:
            calling = tool.call(parameters) if tool.is_async else threads.run(partial(tool.fn, **parameters))
            return normalize_function_tool_return(await _within(calling, tool.name, timeout_s))

        return await _once(tool, run)

    return replace(tool, fn=call, is_async=True)


class JournaledTool:
    """A ``BaseTool`` behind a journal; everything but its life cycle is the tool's own."""

    def __init__(self, tool: BaseTool, timeout_s: float | None = None) -> None:
        self._tool = tool
        self._timeout_s = timeout_s
        self._to_create: dict[str, dict[str, Any]] = {}
        self._created: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Return an instance id; the tool's own instance is created by the first call that is not in the journal."""
        instance_id = instance_id or uuid4().hex
        self._to_create[instance_id] = kwargs
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Result:
        """The result of this call: from the journal, else from the tool."""

        async def call() -> Result:
            if instance_id in self._to_create:
                created, _ = await self._tool.create(instance_id, **self._to_create.pop(instance_id))
                self._created[instance_id] = created
            return await self._tool.execute(self._created[instance_id], parameters, **kwargs)

        return await _once(self._tool, lambda: _within(call(), self._tool.name, self._timeout_s))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release the tool's instance, if one was created."""
        self._to_create.pop(instance_id, None)
        created = self._created.pop(instance_id, None)
        if created is not None:
            await _within(self._tool.release(created, **kwargs), self._tool.name, self._timeout_s)


async def _once(tool: Any, run: Any) -> Result:
    """Result of the running sample's next tool call: from the journal, else from ``run``, which is then journaled."""
    sample = LIVE_SAMPLE.get()
    if sample is None:
        return await run()
    number = sample.tool_calls
    sample.tool_calls += 1
    if (recorded := sample.restored_tools.pop(number, None)) is not None and "started" not in recorded:
        return _replayed(recorded)
    if repeatable(tool):
        # The call may take long, so the turn that asks for it is reported now.
        sample.keeper.report_now(sample)
    elif recorded is not None:
        return _cut_off(sample, number, tool.name)
    else:
        await sample.start_tool_call({"call": number, "started": tool.name})
    try:
        response, reward, metrics = await run()
    except ToolTimeoutError:
        # There is no answer: a retry of the sample calls again if the tool allows it.
        raise
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            # The sample itself is being ended.
            raise
        cancelled = "the call was cancelled from within; it may have had its effect, and is not made again"
        sample.add_tool_result({"call": number, "error": cancelled})
        raise ToolError(cancelled) from error
    except Exception as error:
        sample.add_tool_result({"call": number, "error": str(error)})
        raise
    _record(sample, number, response, reward)
    return response, reward, metrics


async def _within(call: Awaitable[T], tool: str, timeout_s: float | None) -> T:
    """``call``'s result.

    Raises:
        ToolTimeoutError: none within ``timeout_s``; the running sample fails with it, too.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            raise
        sample = LIVE_SAMPLE.get()
        late = ToolTimeoutError(
            f"tool {tool} gave no answer{'' if sample is None else f' to sample {sample.id}'} within {timeout_s:g} s "
            f"(partial_rollout.failures.tool_timeout_s)"
        )
        if sample is not None:
            sample.clock.end(late)
        raise late from error


def _cut_off(sample: LiveSample, number: int, name: str) -> Result:
    logger.warning("sample %s: its call %d, of %s, was cut off and is not made again", sample.id, number, name)
    error = "the call was cut off before its result was known; it may have had its effect, and is not made again"
    sample.add_tool_result({"call": number, "error": error})
    raise ToolError(error)


def _record(sample: LiveSample, number: int, response: ToolResponse, reward: float | None) -> None:
    if response.image or response.video:
        raise ValueError(
            f"sample {sample.id}: its tool returned images or video: partial rollout trains text only; "
            f"set partial_rollout.enable=False"
        )
    sample.add_tool_result({"call": number, "text": response.text, "reward": None if reward is None else float(reward)})


def _replayed(recorded: dict[str, Any]) -> Result:
    if "error" in recorded:
        raise ToolError(recorded["error"])
    return ToolResponse(text=recorded["text"]), recorded["reward"], {}
