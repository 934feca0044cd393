"""A tool call is made once: its result is journaled, and a replay returns it."""

import asyncio
import contextlib

import pytest
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from recipe.partial_rollout.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.tool_journal import ToolError, journaled

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
)


class Keeper:
    """Collects what a sample notes."""

    def __init__(self):
        self.results = []

    @contextlib.asynccontextmanager
    async def engine_call(self, sample):
        yield

    def hand_in(self, sample):
        raise AssertionError("no engine call here")

    def note(self, sample):
        self.results += sample.take_unsent()[1]


def live(results=()):
    return LiveSample("0/0#0", Keeper(), priority=0, restored_tools={result["call"]: result for result in results})


def adder(calls, delay=lambda a: 0):
    async def add(a):
        await asyncio.sleep(delay(a))
        calls.append(a)
        if a < 0:
            raise ValueError(f"{a} is negative")
        return ToolResponse(text=str(a + 1)), 0.5, {}

    return FunctionTool(name="add", fn=add, tool_schema=SCHEMA, is_async=True)


def run(sample, coroutine):
    async def main():
        LIVE_SAMPLE.set(sample)
        return await coroutine()

    return asyncio.run(main())


def test_finished_call_is_noted_and_replayed_without_being_made():
    calls, first = [], live()
    (tool,) = journaled([adder(calls)])
    made = run(first, lambda: tool.call({"a": 1}))
    second = live(first.keeper.results)
    replayed = run(second, lambda: tool.call({"a": 1}))
    assert calls == [1]
    assert (made[0].text, made[1]) == (replayed[0].text, replayed[1]) == ("2", 0.5)
    assert second.keeper.results == []


def test_first_call_that_the_journal_lacks_is_made():
    calls, first = [], live()
    (tool,) = journaled([adder(calls)])
    run(first, lambda: tool.call({"a": 1}))

    async def two():
        return [(await tool.call({"a": a}))[0].text for a in (1, 5)]

    assert run(live(first.keeper.results), two) == ["2", "6"]
    assert calls == [1, 5]


def test_parallel_calls_are_told_apart_whichever_ends_first():
    calls, first = [], live()
    (tool,) = journaled([adder(calls, delay=lambda a: 0.02 / a)])

    async def both():
        return [text.text for text, _, _ in await asyncio.gather(*[tool.call({"a": a}) for a in (1, 9)])]

    assert run(first, both) == ["2", "10"] and calls == [9, 1]
    assert [result["call"] for result in first.keeper.results] == [1, 0]
    assert run(live(first.keeper.results), both) == ["2", "10"] and len(calls) == 2


def test_call_that_failed_fails_the_same_way_again():
    calls, first = [], live()
    (tool,) = journaled([adder(calls)])
    with pytest.raises(ValueError, match="-1 is negative"):
        run(first, lambda: tool.call({"a": -1}))
    with pytest.raises(ToolError, match="-1 is negative"):
        run(live(first.keeper.results), lambda: tool.call({"a": -1}))
    assert calls == [-1]


class Sandbox(BaseTool):
    """Counts the instances that it makes."""

    def __init__(self):
        super().__init__({}, SCHEMA)
        self.events = []

    async def create(self, instance_id=None, **kwargs):
        self.events.append(("create", kwargs["create_kwargs"]))
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.events.append("execute")
        return ToolResponse(text="done"), 1.0, {"ms": 3}

    async def release(self, instance_id, **kwargs):
        self.events.append("release")


def test_tool_with_a_life_cycle_is_created_only_for_calls_that_are_made():
    sandbox, first = Sandbox(), live()
    (tool,) = journaled([sandbox])

    async def conversation():
        instance, _ = await tool.create(create_kwargs={"seed": 7})
        response, reward, _ = await tool.execute(instance, {})
        await tool.release(instance)
        return response.text, reward

    assert run(first, conversation) == run(live(first.keeper.results), conversation) == ("done", 1.0)
    assert sandbox.events == [("create", {"seed": 7}), "execute", "release"]
    assert tool.name == "add" and tool.tool_schema is SCHEMA


def test_outside_of_a_training_sample_a_tool_is_only_itself():
    calls = []
    (tool,) = journaled([adder(calls)])
    run(None, lambda: tool.call({"a": 1}))
    run(None, lambda: tool.call({"a": 1}))
    assert calls == [1, 1]


def test_images_are_refused():
    async def picture():
        return ToolResponse(text="", image=[object()])

    (tool,) = journaled([FunctionTool(name="add", fn=picture, tool_schema=SCHEMA, is_async=True)])
    with pytest.raises(ValueError, match=r"trains text only; set partial_rollout\.enable=False"):
        run(live(), lambda: tool.call({}))
