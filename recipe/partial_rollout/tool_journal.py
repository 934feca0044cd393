"""Tools that are called once: the result of every finished call is journaled, and a replay returns it.

A sample whose worker died, or whose run crashed, plays its conversation again from the start: engine calls answer from
the journal (``PartialRolloutLLMClient``), and so do these tools. The first call that the journal does not hold is real.

Calls are numbered in the order in which the agent loop makes them, which a replay repeats: verl's ``ToolAgentLoop``
starts the parallel calls of a turn in their order. What a tool keeps outside its result (a sandbox, files) is not
journaled: such a tool must be able to rebuild it in ``create``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse

from recipe.partial_rollout.live_sample import LIVE_SAMPLE, LiveSample

Result = tuple[ToolResponse, float | None, dict[str, Any]]


class ToolError(RuntimeError):
    """A tool call that failed before, replayed."""


def journaled(tools: list[Any]) -> list[Any]:
    """``tools`` as verl loads them (``load_all_tools``), each with a journal."""
    return [_journaled_function(tool) if isinstance(tool, FunctionTool) else JournaledTool(tool) for tool in tools]


def _journaled_function(tool: FunctionTool) -> FunctionTool:
    async def call(**parameters: Any) -> Result:
        async def run() -> Result:
            return normalize_function_tool_return(await tool.call(parameters))

        return await _once(run)

    return replace(tool, fn=call, is_async=True)


class JournaledTool:
    """A ``BaseTool`` behind a journal; everything but its life cycle is the tool's own."""

    def __init__(self, tool: BaseTool) -> None:
        self._tool = tool
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

        async def run() -> Result:
            if instance_id in self._to_create:
                created, _ = await self._tool.create(instance_id, **self._to_create.pop(instance_id))
                self._created[instance_id] = created
            return await self._tool.execute(self._created[instance_id], parameters, **kwargs)

        return await _once(run)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release the tool's instance, if one was created."""
        self._to_create.pop(instance_id, None)
        created = self._created.pop(instance_id, None)
        if created is not None:
            await self._tool.release(created, **kwargs)


async def _once(run: Any) -> Result:
    """The journal's result of the running sample's next tool call, or that of ``run``, journaled."""
    sample = LIVE_SAMPLE.get()
    if sample is None:
        return await run()
    number = sample.tool_calls
    sample.tool_calls += 1
    if (recorded := sample.restored_tools.pop(number, None)) is not None:
        return _replayed(recorded)
    try:
        response, reward, metrics = await run()
    except Exception as error:
        sample.add_tool_result({"call": number, "error": str(error)})
        raise
    _record(sample, number, response, reward)
    return response, reward, metrics


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
