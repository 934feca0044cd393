"""A tool call is made once: its result is journaled, and a replay returns it."""

import asyncio
import hashlib
import time
from contextvars import ContextVar
from copy import deepcopy
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import ToolResponse

from recipe.partial_rollout.worker.tool_journal import ToolTimeoutError, journaled, repeatable
from tests.unit.shared import Keeper, hangs, lets_a_cancellation_out, live_sample, tool_schema

SCHEMA = tool_schema("add")


def live(results=()):
    return live_sample(Keeper(), tool_results=results)


def tool_of(function, *, is_async=True):
    return FunctionTool(name="add", fn=function, tool_schema=SCHEMA, is_async=is_async)


def run(sample, tool, story, timeout_s=None):
    """What ``story`` returns of ``tool``, as the agent loop of ``sample`` or of a validation has it."""

    async def main():
        (ours,) = journaled([tool], sample, timeout_s)
        return await story(ours)

    return asyncio.run(main())


async def answers_of(calls):
    """The text or the error of each call, all made at once."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    return [str(answer) if isinstance(answer, Exception) else answer[0].text for answer in answers]


def test_call_that_ended_is_replayed_without_being_made_whichever_ended_first_and_however():
    calls, first = [], live()

    async def add(a):
        await asyncio.sleep(0.02 if a == 1 else 0)
        calls.append(a)
        if a < 0:
            raise ValueError(f"{a} is negative")
        return ToolResponse(text=str(a + 1)), 0.5, {}

    tool = tool_of(add)

    def three(tool):
        return answers_of([tool.call({"a": a}) for a in (1, 9, -1)])

    made = run(first, tool, three)
    second = live(first.keeper.results)
    assert run(second, tool, three) == made == ["2", "10", "-1 is negative"] and calls == [9, -1, 1]
    assert (first.calls_replayed, second.calls_replayed, second.keeper.results) == (0, 3, [])
    again = live(first.keeper.results)
    assert run(again, tool, lambda tool: tool.call({"a": 1}))[1] == 0.5
    # Outside of a training sample a tool is only itself.
    assert run(None, tool, three) == run(None, tool, three) == made and len(calls) == 9


@pytest.mark.parametrize("allowed", [False, True])
def test_call_that_was_cut_off_is_made_again_only_by_a_tool_that_allows_it(allowed):
    calls, first = [], live()

    async def buy(a):
        calls.append(a)
        await asyncio.sleep(0.05 * a)
        return f"bought {a}"

    buy.repeatable = allowed
    tool = tool_of(buy)

    def both(tool):
        return answers_of([tool.call({"a": a}) for a in (1, 0)])

    async def dies(tool):
        task = asyncio.ensure_future(both(tool))
        await asyncio.sleep(0.02)
        task.cancel()

    run(first, tool, dies)
    # An older run journals the beginning of a call even if its tool allows it now.
    (of_zero,) = (entry["asked"] for entry in first.keeper.results if "text" in entry)
    of_one = hashlib.blake2b(repr({"a": 1}).encode(), digest_size=16).hexdigest()
    assert of_one != of_zero
    journal = [{"call": 0, "tool": "add", "asked": of_one, "started": True}, *first.keeper.results]
    second = live(journal)
    answers = run(second, tool, both)
    assert answers[1] == "bought 0" and calls == [1, 0] + [1] * allowed
    assert answers[0] == "bought 1" if allowed else "may have had its effect, and is not made again" in answers[0]
    assert run(live([*journal, *second.keeper.results]), tool, both) == answers, "every replay is alike"


class Sandbox(BaseTool):
    """Notes its life cycle."""

    def __init__(self, **config):
        super().__init__(config, SCHEMA)
        self.events = []

    async def create(self, instance_id=None, **kwargs):
        self.events.append(("create", kwargs["create_kwargs"]))
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, call_id=None, **kwargs):
        self.events.append("execute")
        return ToolResponse(text=str(call_id)), 1.0, {"ms": 3}

    async def release(self, instance_id, **kwargs):
        self.events.append("release")


def test_tool_with_a_life_cycle_is_created_only_for_calls_that_are_made_and_gets_their_ids():
    sandbox, first = Sandbox(), live()
    seen = []

    async def conversation(tool):
        seen[:] = [tool.name, tool.tool_schema]
        instance, _ = await tool.create(create_kwargs={"seed": 7})
        answers = [(await tool.execute(instance, {}))[0].text for _ in range(2)]
        await tool.release(instance)
        return answers

    made = run(first, sandbox, conversation)
    assert run(live(first.keeper.results), sandbox, conversation) == made == ["0/0#0/0", "0/0#0/1"]
    assert sandbox.events == [("create", {"seed": 7}), "execute", "execute", "release"]
    assert seen == ["add", SCHEMA]
    assert run(None, sandbox, conversation) == ["None", "None"], "in validation"


def test_tool_says_in_its_class_or_in_its_config_that_it_may_be_called_again():
    class Search(Sandbox):
        repeatable = True

    assert [repeatable(tool) for tool in (Search(), Sandbox(repeatable=True), Sandbox())] == [True, True, False]


def test_images_are_refused():
    async def picture():
        return ToolResponse(text="", image=[object()])

    with pytest.raises(ValueError, match=r"trains text only; set partial_rollout\.enable=False"):
        run(live(), tool_of(picture), lambda tool: tool.call({}))


# -- limits --------------------------------------------------------------------------------------------------------------


def calls_in_verls_loop(tool, sample):
    """What verl's agent loop makes of one call of ``tool``, under the sample's clock."""
    loop = SimpleNamespace(tools={tool.name: tool}, max_tool_response_length=100, tool_response_truncate_side="left")
    call = ToolAgentLoop._call_tool(loop, FunctionCall(name=tool.name, arguments="{}"), {}, None)
    return sample.clock.run(call)


def hanging_sandbox(verb):
    sandbox = Sandbox()
    setattr(sandbox, verb, hangs)
    return sandbox


async def hangs_in_restore():
    return "2"


hangs_in_restore.restore = hangs
HANGING = {
    "coroutine": tool_of(hangs),
    "thread": tool_of(lambda: time.sleep(0.5), is_async=False),
    "restore": tool_of(hangs_in_restore),
    **{verb: hanging_sandbox(verb) for verb in ("create", "execute", "release")},
}


@pytest.mark.parametrize("where", HANGING)
def test_tool_that_hangs_fails_its_sample_and_is_no_answer_in_verls_loop(where):
    sample = live()
    with pytest.raises(ToolTimeoutError, match=r"tool add .* sample 0/0#0 within 0\.1 s .*tool_timeout_s"):
        run(sample, HANGING[where], lambda late: calls_in_verls_loop(late, sample), 0.1)
    if where not in ("release", "restore"):
        assert [entry.get("started") for entry in sample.keeper.results] == [True], "it has no answer"
    if where == "coroutine":
        with pytest.raises(ToolTimeoutError, match=r"tool add gave no answer within 0\.1 s"):
            run(None, HANGING[where], lambda late: late.call({}), 0.1)


async def times_out():
    raise TimeoutError("the sandbox is gone")


@pytest.mark.parametrize(
    ("function", "said"),
    [(times_out, "the sandbox is gone"), (lets_a_cancellation_out, "it may have had its effect")],
)
def test_tools_own_timeout_or_cancellation_is_its_answer_and_its_sample_goes_on(function, said):
    sample = live()
    response, _, _ = run(sample, tool_of(function), lambda tool: calls_in_verls_loop(tool, sample), 5.0)
    assert said in response.text and said in sample.keeper.results[-1]["error"]


# -- tools that know their state -----------------------------------------------------------------------------------------


def workspace(kept, *verbs):
    """A stateful tool: appends to a conversation's file, slowly; of the protocol it knows ``verbs``.

    ``kept`` outlives a worker: what is on disk. Each call's record is part of the state, so a restore takes it back too.
    """

    async def append(text, call_id=None):
        state = kept.setdefault(call_id.rpartition("/")[0], {"text": "", "calls": {}})
        await asyncio.sleep(0)
        state["text"] += text
        if text == "!":
            raise ValueError("disk full")
        await asyncio.sleep(0)
        state["calls"][call_id] = state["text"]
        await asyncio.sleep(0)
        return state["text"]

    async def status(call_id):
        return kept.get(call_id.rpartition("/")[0], {"calls": {}})["calls"].get(call_id)

    async def snapshot(conversation):
        return deepcopy(kept[conversation])

    async def restore(conversation, handle):
        kept[conversation] = deepcopy(handle or {"text": "", "calls": {}})

    for verb in (status, snapshot, restore):
        if verb.__name__ in verbs:
            setattr(append, verb.__name__, verb)
    return tool_of(append)


@pytest.mark.parametrize("verbs", [("status", "snapshot", "restore"), ("snapshot", "restore")])
@pytest.mark.parametrize("ticks", range(1, 17))
def test_effects_happen_once_however_often_the_worker_dies_and_wherever(verbs, ticks):
    """The file at the end, and each answer, are those of a life without deaths; here each lasts some turns of the loop."""
    left_by_a_dead_run = {"text": "z", "calls": {"0/0#0/0": "z"}}
    kept, journal, lives = {"0/0#0": left_by_a_dead_run}, [], 0

    async def life(ours):
        async def calls():
            return [(await answers_of([ours.call({"text": text})]))[0] for text in "ab!c"]

        task = asyncio.ensure_future(calls())
        if lives <= 6:
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    answers = None
    while not isinstance(answers, list):
        lives += 1
        sample = live(journal)
        answers = run(sample, workspace(kept, *verbs), life)
        journal = [*journal, *sample.keeper.results]
    assert answers == ["a", "ab", "disk full", "ab!c"] and kept["0/0#0"]["text"] == "ab!c" and lives > 1


def test_parallel_calls_of_a_stateful_tool_come_after_one_another():
    sample, tool = live(), workspace({}, "snapshot", "restore")
    run(sample, tool, lambda ours: answers_of([ours.call({"text": text}) for text in "ab"]))
    assert [entry["state"]["text"] for entry in sample.keeper.results if "state" in entry] == ["a", "ab"]


# -- threads of synchronous tools ----------------------------------------------------------------------------------------


def test_call_in_a_thread_has_the_context_and_the_error_of_its_own():
    user = ContextVar("user")

    def add():
        raise LookupError(user.get())

    def called(tool):
        user.set("ada")
        return answers_of([tool.call({})])

    assert run(live(), tool_of(add, is_async=False), called) == ["ada"]
