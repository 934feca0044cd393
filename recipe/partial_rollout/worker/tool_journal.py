"""Tools that are called once: the result of every finished call is journaled, and a replay returns it.

A sample whose worker died, or whose run crashed, plays its conversation again from the start: engine calls answer from
the journal (``PartialRolloutLLMClient``), and so do these tools. The first call that the journal does not hold is real.

Calls are numbered in the order in which the agent loop makes them, which a replay repeats: verl's ``ToolAgentLoop``
starts the parallel calls of a turn in their order. What a tool keeps outside its result (a sandbox, files) is not
journaled: such a tool must be able to rebuild it in ``create``.

A call that takes too long ends its sample: agent loops turn what a tool raises into its answer, which a hung tool has not
given. The call is cancelled where it can be: a synchronous function runs in a thread (``tool_threads``), which goes on by
itself until it returns; a coroutine that blocks the event loop stops its worker, which only ``deadlines.stall_s`` sees.

A call that ran out of time, or was under way when its worker died or the checkpoint was taken that a run goes on from, may
have had its effect. It is made again only if its tool says that it may: ``repeatable = True`` as an attribute of the
``BaseTool`` or of the function, or ``repeatable: true`` in the tool's ``config``. Any other tool's call is journaled before
it is made, with the manager's word that it has it, and a replay answers it with an error, which verl's tool loop shows to
the model as it does any other error of a tool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse

from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.tool_threads import ToolThreads

logger = logging.getLogger(__name__)

Result = tuple[ToolResponse, float | None, dict[str, Any]]


T = TypeVar("T")


class ToolError(RuntimeError):
    """A tool call that failed before, replayed, or that was cut off."""


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
        """Promise an instance: the tool's own is created by the first call that the journal does not hold."""
        instance_id = instance_id or uuid4().hex
        self._to_create[instance_id] = kwargs
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Result:
        """The recorded result of this call, or the tool's."""

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
    """The journal's result of the running sample's next tool call, or that of ``run``, journaled."""
    sample = LIVE_SAMPLE.get()
    if sample is None:
        return await run()
    number = sample.tool_calls
    sample.tool_calls += 1
    if (recorded := sample.restored_tools.pop(number, None)) is not None and "started" not in recorded:
        return _replayed(recorded)
    if repeatable(tool):
        # The call may take long: the manager is told of the turn that asks for it.
        sample.keeper.note(sample)
    elif recorded is not None:
        return _cut_off(sample, number, tool.name)
    else:
        await sample.start_tool_call({"call": number, "started": tool.name})
    try:
        response, reward, metrics = await run()
    except ToolTimeoutError:
        # No answer: a retry of the sample asks again, if it may.
        raise
    except Exception as error:
        sample.add_tool_result({"call": number, "error": str(error)})
        raise
    _record(sample, number, response, reward)
    return response, reward, metrics


async def _within(call: Awaitable[T], tool: str, timeout_s: float | None) -> T:
    """``call``'s result.

    Raises:
        ToolTimeoutError: none within ``timeout_s``; the running sample ends with it as well.
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
