"""A tool's call has a deadline; all else of a tool is its own, as under verl."""

import asyncio
import time
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import ToolResponse

from recipe.partial_rollout.worker.live_sample import SampleClock
from recipe.partial_rollout.worker.tool_deadline import timed
from tests.unit.shared import hangs, tool_schema

SCHEMA = tool_schema("add")


def tool_of(function, *, is_async=True):
    return FunctionTool(name="add", fn=function, tool_schema=SCHEMA, is_async=is_async)


def run(tool, story, timeout_s=None):
    """What ``story(tool)`` returns within a sample's clock, and the errors that were noted."""
    noted = []

    async def main():
        clock = SampleClock("sample 0/0#0")
        (ours,) = timed([tool], clock, timeout_s, noted.append)
        return await clock.run(story(ours))

    return asyncio.run(main()), noted


class Sandbox(BaseTool):
    """Notes its life cycle."""

    def __init__(self, **config):
        super().__init__(config, SCHEMA)
        self.events = []

    async def create(self, instance_id=None, **kwargs):
        self.events.append(("create", kwargs["create_kwargs"]))
        return "box 7", ToolResponse(text="you are in a hall")

    async def execute(self, instance_id, parameters, **kwargs):
        self.events.append(("execute", instance_id, parameters))
        return ToolResponse(text="ok"), 1.0, {"ms": 3}

    async def release(self, instance_id, **kwargs):
        self.events.append("release")


def test_life_cycle_of_a_tool_is_its_own():
    sandbox = Sandbox()

    async def conversation(tool):
        instance, greeting = await tool.create(create_kwargs={"seed": 7})
        answer, *_ = await tool.execute(instance, {"a": 1})
        await tool.release(instance)
        return tool.name, tool.tool_schema, greeting.text, answer.text

    (name, schema, *said), _ = run(sandbox, conversation)
    assert (name, schema, said) == ("add", SCHEMA, ["you are in a hall", "ok"])
    assert sandbox.events == [("create", {"seed": 7}), ("execute", "box 7", {"a": 1}), "release"]


def in_verls_loop(tool):
    """What verl's agent loop makes of one call of ``tool``."""
    loop = SimpleNamespace(tools={tool.name: tool}, max_tool_response_length=100, tool_response_truncate_side="left")
    return ToolAgentLoop._call_tool(loop, FunctionCall(name=tool.name, arguments="{}"), {}, None)


def hanging_sandbox(verb):
    sandbox = Sandbox()
    setattr(sandbox, verb, hangs)
    return sandbox


HANGING = {
    "coroutine": tool_of(hangs),
    "thread": tool_of(lambda: time.sleep(0.5), is_async=False),
    **{verb: hanging_sandbox(verb) for verb in ("create", "execute", "release")},
}


@pytest.mark.parametrize("where", HANGING)
def test_tool_that_hangs_fails_its_sample_and_is_no_answer_in_verls_loop(where):
    with pytest.raises(TimeoutError, match=r"tool add .* sample 0/0#0 within 0\.1 s .*tool_timeout_s"):
        run(HANGING[where], in_verls_loop, 0.1)


def test_tools_own_timeout_is_its_answer_and_is_noted():
    async def times_out():
        raise TimeoutError("the sandbox is gone")

    (response, _, _), noted = run(tool_of(times_out), in_verls_loop, 5.0)
    assert "the sandbox is gone" in response.text and [str(error) for error in noted] == ["the sandbox is gone"]


def test_call_in_a_thread_has_the_context_and_the_error_of_its_own():
    user = ContextVar("user")

    def add():
        raise LookupError(user.get())

    async def called(tool):
        user.set("ada")
        with pytest.raises(LookupError, match="ada"):
            await tool.call({})

    _, noted = run(tool_of(add, is_async=False), called)
    assert len(noted) == 1
