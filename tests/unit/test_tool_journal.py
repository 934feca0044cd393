"""A tool call is made once: its result is journaled, and a replay returns it."""

import asyncio
import contextlib
import json
import math
import time
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from recipe.partial_rollout.config.sections import ToolCalls
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.tool_journal import ToolError, ToolTimeoutError, journaled, repeatable

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

    def release_slot(self, sample):
        raise AssertionError("no engine call here")

    def report_now(self, sample):
        self.results += sample.take_unsent()[1]

    def leave(self, sample):
        raise AssertionError("no call here takes so long")

    async def tell(self, sample):
        await asyncio.sleep(0)
        self.report_now(sample)


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


def dies_in(tool, sample, **parameters):
    """The journal of a sample whose worker dies while ``tool`` runs."""

    async def call():
        task = asyncio.ensure_future(tool.call(parameters))
        await asyncio.sleep(0.02)
        task.cancel()

    run(sample, call)
    return sample.keeper.results


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
    assert (first.calls_replayed, second.calls_replayed) == (0, 1)
    assert [entry["call"] for entry in first.keeper.results] == [0, 0] and second.keeper.results == []


def test_parallel_calls_are_told_apart_whichever_ends_first():
    calls, first = [], live()
    (tool,) = journaled([adder(calls, delay=lambda a: 0.02 / a)])

    async def both():
        return [text.text for text, _, _ in await asyncio.gather(*[tool.call({"a": a}) for a in (1, 9)])]

    assert run(first, both) == ["2", "10"] and calls == [9, 1]
    assert [entry["call"] for entry in first.keeper.results if "text" in entry] == [1, 0]
    assert run(live(first.keeper.results), both) == ["2", "10"] and len(calls) == 2


def test_call_that_failed_fails_the_same_way_again():
    calls, first = [], live()
    (tool,) = journaled([adder(calls)])
    with pytest.raises(ValueError, match="-1 is negative"):
        run(first, lambda: tool.call({"a": -1}))
    with pytest.raises(ToolError, match="-1 is negative"):
        run(live(first.keeper.results), lambda: tool.call({"a": -1}))
    assert calls == [-1]


def slow(calls):
    """A tool whose effect comes before its result."""

    async def buy(a):
        calls.append(a)
        await asyncio.sleep(0.05)
        return ToolResponse(text=f"bought {a}"), 0.0, {}

    return FunctionTool(name="buy", fn=buy, tool_schema=SCHEMA, is_async=True)


def test_call_that_was_cut_off_is_not_made_again_and_fails_alike_in_every_replay():
    calls = []
    (ours,) = journaled([slow(calls)])
    journal = dies_in(ours, live(), a=1)
    assert journal == [{"call": 0, "started": "buy"}] and calls == [1]
    second = live(journal)
    with pytest.raises(ToolError, match="it may have had its effect, and is not made again"):
        run(second, lambda: ours.call({"a": 1}))
    with pytest.raises(ToolError, match="is not made again"):
        run(live([*journal, *second.keeper.results]), lambda: ours.call({"a": 1}))
    assert calls == [1]


def test_call_that_was_cut_off_is_made_again_by_a_tool_that_allows_it():
    calls = []
    tool = slow(calls)
    tool.fn.repeatable = True
    (ours,) = journaled([tool])
    journal = dies_in(ours, live(), a=1)
    assert journal == []
    response, _, _ = run(live(journal), lambda: ours.call({"a": 1}))
    assert response.text == "bought 1" and calls == [1, 1]


def test_parallel_calls_of_which_one_was_cut_off_are_told_apart():
    calls, first = [], live()
    (tool,) = journaled([adder(calls, delay=lambda a: 0 if a == 1 else 1)])

    async def cut():
        both = asyncio.gather(*[tool.call({"a": a}) for a in (1, 9)])
        await asyncio.sleep(0.02)
        both.cancel()

    async def both():
        answers = await asyncio.gather(*[tool.call({"a": a}) for a in (1, 9)], return_exceptions=True)
        return answers[0][0].text, str(answers[1])

    run(first, cut)
    text, error = run(live(first.keeper.results), both)
    assert text == "2" and "is not made again" in error and calls == [1]


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


def test_tool_says_in_its_class_or_in_its_config_that_it_may_be_called_again():
    class Search(Sandbox):
        repeatable = True

    configured = Sandbox()
    configured.config = {"repeatable": True}
    assert [repeatable(tool) for tool in (Search(), configured, Sandbox(), adder([]).fn)] == [True, True, False, False]


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


def calls_in_verls_loop(tool, sample):
    """What verl's agent loop makes of one call of ``tool``, under the sample's clock."""
    loop = SimpleNamespace(tools={tool.name: tool}, max_tool_response_length=100, tool_response_truncate_side="left")
    call = ToolAgentLoop._call_tool(loop, FunctionCall(name=tool.name, arguments='{"a": 1}'), {}, None)
    return sample.clock.run(call)


def sync_adder(delay_s):
    def add(a):
        time.sleep(delay_s)
        return str(a + 1)

    return FunctionTool(name="add", fn=add, tool_schema=SCHEMA, is_async=False)


def hanging_sandbox(verb):
    sandbox = Sandbox()

    async def hang(*_, **__):
        await asyncio.sleep(60)

    setattr(sandbox, verb, hang)
    return sandbox


HANGING = {
    "coroutine": adder([], delay=lambda a: 60),
    "thread": sync_adder(0.5),
    **{verb: hanging_sandbox(verb) for verb in ("create", "execute", "release")},
}


@pytest.mark.parametrize("where", HANGING)
def test_tool_that_hangs_fails_its_sample_and_is_no_answer_in_verls_loop(where):
    sample = live()
    (late,) = journaled([HANGING[where]], 0.1, ToolCalls(release_after_s=math.inf))
    with pytest.raises(
        ToolTimeoutError, match=r"tool add gave no answer to sample 0/0#0 within 0\.1 s .*tool_timeout_s"
    ):
        run(sample, lambda: calls_in_verls_loop(late, sample))
    if where != "release":
        assert sample.keeper.results == [{"call": 0, "started": "add"}], "it has no answer"


def test_timeout_of_a_tools_own_is_its_answer():
    async def add(a):
        raise TimeoutError("the sandbox is gone")

    sample = live()
    (tool,) = journaled([FunctionTool(name="add", fn=add, tool_schema=SCHEMA, is_async=True)], 5.0)
    response, _, _ = run(sample, lambda: calls_in_verls_loop(tool, sample))
    assert "the sandbox is gone" in response.text
    assert [entry["error"] for entry in sample.keeper.results if "error" in entry] == ["the sandbox is gone"]


def test_tool_that_hangs_in_validation_is_an_error_of_the_tool():
    (tool,) = journaled([adder([], delay=lambda a: 60)], 0.1)
    with pytest.raises(ToolTimeoutError, match=r"tool add gave no answer within 0\.1 s"):
        run(None, lambda: tool.call({"a": 1}))


def test_tool_that_lets_a_cancellation_out_has_failed_and_its_sample_goes_on():
    async def add(a):
        call = asyncio.ensure_future(asyncio.sleep(60))
        await asyncio.sleep(0)
        call.cancel()
        await call

    sample = live()
    (tool,) = journaled([FunctionTool(name="add", fn=add, tool_schema=SCHEMA, is_async=True)], 5.0)
    response, _, _ = run(sample, lambda: calls_in_verls_loop(tool, sample))
    assert "it may have had its effect" in response.text
    assert [entry["call"] for entry in sample.keeper.results if "error" in entry] == [0]


class Workspace:
    """A stateful tool: appends to a conversation's file, slowly, and knows all that the protocol asks for.

    ``kept`` outlives a worker: what is on disk. Each call's record is part of the state, so a restore takes it back too.
    """

    def __init__(self, kept, *, verbs=("status", "snapshot", "restore")):
        self.kept, self.asked = kept, []

        async def append(text, call_id=None):
            return await self._append(text, call_id)

        self.fn = append
        for verb in verbs:
            setattr(self.fn, verb, getattr(self, f"_{verb}"))

    async def _append(self, text, call_id):
        conversation = call_id.rpartition("/")[0]
        state = self.kept.setdefault(conversation, {"text": "", "calls": {}})
        await asyncio.sleep(0)
        state["text"] += text
        await asyncio.sleep(0)
        state["calls"][call_id] = state["text"]
        await asyncio.sleep(0)
        return state["text"]

    async def _status(self, call_id):
        self.asked.append(call_id)
        return self.kept.get(call_id.rpartition("/")[0], {"calls": {}})["calls"].get(call_id)

    async def _snapshot(self, conversation):
        return json.loads(json.dumps(self.kept[conversation]))

    async def _restore(self, conversation, handle):
        self.kept[conversation] = json.loads(json.dumps(handle or {"text": "", "calls": {}}))


def workspace(kept, **options):
    tool = Workspace(kept, **options)
    (ours,) = journaled([FunctionTool(name="workspace", fn=tool.fn, tool_schema=SCHEMA, is_async=True)])
    return tool, ours


async def append_all(ours, texts):
    return [(await ours.call({"text": text}))[0].text for text in texts]


@pytest.mark.parametrize("verbs", [("status", "snapshot", "restore"), ("snapshot", "restore")])
@pytest.mark.parametrize("ticks", range(1, 17))
def test_effects_happen_once_however_often_the_worker_dies_and_wherever(verbs, ticks):
    """The file at the end, and each answer, are those of a life without deaths; here each lasts some turns of the loop."""
    kept, journal, texts, lives = {}, [], ["a", "b", "c", "d"], 0

    async def life(ours):
        task = asyncio.ensure_future(append_all(ours, texts))
        if lives <= 6:
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    answers = None
    while not isinstance(answers, list):
        lives += 1
        sample = live(journal)
        answers = run(sample, lambda: life(workspace(kept, verbs=verbs)[1]))
        journal = [*journal, *sample.keeper.results]
    assert answers == ["a", "ab", "abc", "abcd"] and kept["0/0#0"]["text"] == "abcd"
    assert lives > 1 and not any("error" in entry for entry in journal)


def test_status_is_asked_of_a_call_with_an_unknown_outcome_alone_and_its_answer_is_journaled():
    kept = {}
    tool, ours = workspace(kept, verbs=("status",))
    run(live(), lambda: ours.call({"text": "a"}))
    started = {"call": 0, "started": "workspace"}
    again = live([started])
    response, _, _ = run(again, lambda: ours.call({"text": "a"}))
    assert response.text == kept["0/0#0"]["text"] == "a" and tool.asked == ["0/0#0/0"]
    assert (again.calls_asked, again.calls_replayed) == (1, 0)
    assert again.keeper.results == [{"call": 0, "text": "a", "reward": 0.0}]
    # It never happened, so it is made; nobody is told twice that it begins.
    kept.clear()
    third = live([started])
    assert run(third, lambda: ours.call({"text": "b"}))[0].text == "b"
    assert third.keeper.results == [{"call": 0, "text": "b", "reward": 0.0}]


def test_resumption_from_before_the_first_call_takes_back_what_a_dead_run_did():
    kept = {}
    run(live(), lambda: append_all(workspace(kept)[1], ["x", "y"]))
    run(live(), lambda: append_all(workspace(kept)[1], ["z"]))
    assert kept["0/0#0"] == {"text": "z", "calls": {"0/0#0/0": "z"}}


def test_state_after_a_call_that_failed_is_journaled_too():
    kept, sample = {}, live()
    tool = Workspace(kept)

    async def fails(text, call_id=None):
        await tool._append(text, call_id)
        raise ValueError("disk full")

    for verb in ("snapshot", "restore"):
        setattr(fails, verb, getattr(tool, f"_{verb}"))
    (ours,) = journaled([FunctionTool(name="workspace", fn=fails, tool_schema=SCHEMA, is_async=True)])
    with pytest.raises(ValueError, match="disk full"):
        run(sample, lambda: ours.call({"text": "a"}))
    assert sample.keeper.results[-1]["error"] == "disk full" and sample.keeper.results[-1]["state"]["text"] == "a"


def test_parallel_calls_of_a_stateful_tool_come_after_one_another():
    kept, sample = {}, live()
    _, ours = workspace(kept)

    async def both():
        return await asyncio.gather(*[ours.call({"text": text}) for text in "ab"])

    run(sample, both)
    states = [entry["state"]["text"] for entry in sample.keeper.results if "state" in entry]
    assert states == ["a", "ab"]


async def test_tool_is_called_so_many_times_at_once_and_no_clock_runs_for_those_that_wait():
    running, most = 0, 0

    async def look():
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.03)
        running -= 1
        return "4"

    plain = FunctionTool(name="look", fn=look, tool_schema=SCHEMA, is_async=True)
    (ours,) = journaled([plain], 0.05, ToolCalls(release_after_s=math.inf, concurrency=2))

    async def one(i):
        sample = LiveSample(f"0/{i}#0", Keeper(), priority=0, deadline_s=0.05)
        LIVE_SAMPLE.set(sample)
        return (await sample.clock.run(ours.call({})))[0].text

    assert (await asyncio.gather(*[one(i) for i in range(8)])) == ["4"] * 8 and most == 2


def test_tool_with_a_life_cycle_gets_its_call_id_if_it_takes_one():
    class Named(Sandbox):
        async def execute(self, instance_id, parameters, call_id=None, **kwargs):
            return ToolResponse(text=str(call_id)), 0.0, {}

    (tool,) = journaled([Named()])

    async def conversation():
        instance, _ = await tool.create(create_kwargs={})
        return [(await tool.execute(instance, {}))[0].text for _ in range(2)]

    assert run(live(), conversation) == ["0/0#0/0", "0/0#0/1"]
    assert run(None, conversation) == ["None", "None"], "in validation"


def test_call_that_an_older_run_journaled_is_made_again_by_a_tool_that_now_allows_it():
    calls = []
    tool = slow(calls)
    tool.fn.repeatable = True
    (ours,) = journaled([tool])
    assert run(live([{"call": 0, "started": "buy"}]), lambda: ours.call({"a": 1}))[0].text == "bought 1"


def test_one_deadline_holds_for_a_call_with_all_that_belongs_to_it():
    async def add(a):
        await asyncio.sleep(0.08)
        return "2"

    async def restore(conversation, handle):
        await asyncio.sleep(0.08)

    add.restore = restore
    sample = live()
    plain = FunctionTool(name="add", fn=add, tool_schema=SCHEMA, is_async=True)
    (tool,) = journaled([plain], 0.12, ToolCalls(release_after_s=math.inf))
    with pytest.raises(ToolTimeoutError, match=r"within 0\.12 s"):
        run(sample, lambda: calls_in_verls_loop(tool, sample))
    assert sample.keeper.results == [{"call": 0, "started": "add"}]
