"""The worker's half of claims and reports, its clocks, slots and tools: with a real manager, on a scripted engine.

``test_conversation_cut_anywhere`` interrupts it, and lets it die, at every moment of a conversation.
"""

import asyncio
import contextlib
import copy
import threading
import time
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool

from recipe.partial_rollout.manager.types import Lease, RolloutFailedError
from recipe.partial_rollout.waits import InfraError
from recipe.partial_rollout.worker.live_sample import SampleClock, timed
from tests.unit.loop_life import Engine, Life, ask, config_of, function, living, output_of
from tests.unit.shared import hangs, state_of, tokens_in, tool_schema


async def says(client, row, params):
    """As many tokens as the row says of the sample."""
    answer = await ask(client, params, row["lengths"][int(client.sample_id[-1])], [1])
    return output_of([1], answer.token_ids)


def training(lengths, loop=says, **settings):
    """A prompt for each list of ``lengths``, in an open first round; a token takes 2 ms at least."""
    rows = [{"lengths": group} for group in lengths]
    return living(Life(loop, rows, n=len(lengths[0]), config=config_of(400), engine=Engine(tick_s=0.002), **settings))


async def batch_of(one):
    assert await asyncio.wait_for(one.actor.wait_batch(True), 20)
    return await one.actor.batch()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


# -- failures ------------------------------------------------------------------------------------------------------------


async def test_failing_reward_is_asked_again_without_the_loop():
    """Also after its last failure: the sample is masked, and its loop does not run again."""

    async def score(output, row):
        raise OSError("no disk")

    async with training([[5]], score=score) as one:
        (output,) = await one.stop_round()
        assert output.masked and len(one.engine.asked) == 1
        assert (one.figures()["failures/failed_total"], one.figures()["failures/retried_total"]) == (3, 2)


async def test_last_replica_that_dies_ends_the_run():
    async def loop(client, row, params):
        raise InfraError("vLLM replica r0 failed on request 0/0#0")

    async with training([[5, 5]], loop) as one:
        with pytest.raises(RolloutFailedError, match=r"^InfraError: vLLM replica r0"):
            await batch_of(one)


@pytest.mark.parametrize("save_freq", [1, -1])
async def test_output_that_no_checkpoint_can_hold_fails_its_sample(save_freq):
    async def score(output, row):
        output.reward_score = 1.0
        if len(output.response_ids) == 6:
            output.extra_fields["reward_extra_info"] = {"verdict": object()}

    async with training([[5, 6]], score=score, save_freq=save_freq) as one:
        first, second = await one.stop_round()
        assert (first.masked, second.masked) == (False, save_freq > 0)
        said = "0/0#1.reward_extra_info.verdict: builtins.object cannot be saved"
        assert save_freq < 0 or said in second.extra_fields["sample_error"]


async def test_task_that_a_loop_leaves_behind_keeps_no_other_sample_waiting():
    stopped = asyncio.Event()

    async def again(*call):
        while not stopped.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await says(*call)

    async def loop(*call):
        output = await says(*call)
        left.append(asyncio.create_task(again(*call)))
        return output

    left = []
    async with training([[1, 50]], loop) as one:
        first, second = await one.stop_round()
        stopped.set()
        await asyncio.wait(left, timeout=5)
        assert (first.response_length, second.response_length) == (1, 50) and all(task.done() for task in left)


# -- clocks --------------------------------------------------------------------------------------------------------------


async def test_interrupted_sample_may_wait_and_decode_longer_than_its_timeout():
    async with training([[5], [240]], sample_timeout_s=0.3, release_after_s=0.2) as one:
        await one.stop_round()
        await asyncio.sleep(0.4)
        await one.next_round()
        (second,) = await one.stop_round()
        assert one.engine.decoded == 245, "no token was decoded twice"
        assert second.response_length == 240 and not second.masked
        assert one.figures()["failures/failed_total"] == one.figures()["agent/slots_freed_s_total"] == 0


async def test_clock_stands_until_the_last_of_overlapping_waits_and_starts_anew():
    # On a busy machine the short sleep takes longer.
    clock = SampleClock("sample 0/0#0", 0.5)

    async def wait(seconds):
        with clock.stopped():
            await asyncio.sleep(seconds)

    async def loop():
        for _ in range(2):
            await asyncio.gather(wait(0.01), wait(0.6))
            await asyncio.sleep(0.1)
        return "done"

    assert await asyncio.wait_for(clock.run(loop()), 10) == "done"


# -- slots and reports ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "message"),
    [(True, "as live on w1, which does not run it"), (False, "as new to w1, which still runs it")],
)
async def test_disagreement_with_the_manager_on_a_conversation_ends_the_run(held, message):
    async with training([[5], [60]]) as one:
        known = "0/9#0" if held else "0/1#0"
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match=message):
            one.worker._claims.run([Lease(known, "0/1", 1, {"lengths": [5]}, (), resident=held)])


@pytest.mark.parametrize("after_s", [60.0, 0.0], ids=["at the end of the round", "before it"])
async def test_turn_is_known_while_its_reward_goes_on_and_its_slot_is_free(after_s):
    async def score(output, row):
        if row["lengths"] == [7]:
            await hangs()
        output.reward_score = 1.0

    slots = 2 if after_s else 1
    async with training([[7], [60]], score=score, release_after_s=after_s, slots=slots) as one:
        await until(lambda: one.engine.decoded > 20 if after_s else tokens_in(one.actor._manager) > 0)
        assert tokens_in(one.actor._manager) == (0 if after_s else 7)
        await one.stop_round()
        rows = [each for row in state_of(one.actor._manager)["groups"] for each in row["samples"]]
        saved = [(len(made["token_ids"]), made["stop_reason"]) for each in rows for made in each["segments"]]
        assert ([*one.outputs], one.engine.decoded) == (["0/1"], 67)
        assert saved == [(7, "completed")]


def conversations(answer, events):
    """A loop whose samples of 10 tokens make them in two turns with a tool call between them, which awaits ``answer()``."""

    async def look(name):
        events.append(f"{name} asks")
        await answer()
        events.append(f"{name} has its answer")

    async def loop(client, row, params):
        if row["lengths"] != [10]:
            output = await says(client, row, params)
        else:
            first = (await ask(client, params, 5, [1])).token_ids
            await row["tools"]["look"].call({"name": client.sample_id})
            second = (await ask(client, params, 5, [1, *first, 4])).token_ids
            output = output_of([1], [*first, 4, *second], [1] * 5 + [0] + [1] * 5)
        events.append(f"{client.sample_id} has ended")
        return output

    return {"loop": loop, "functions": [function("look", look)]}


async def test_slot_of_a_sample_in_a_tool_is_anothers_until_it_comes_back():
    events, answered = [], asyncio.Event()
    talks = conversations(answered.wait, events)

    def states():
        return [sample.state for sample in one.actor._manager.samples.unfinished.values()]

    async with training([[10], [120], [5]], slots=1, release_after_s=0.02, **talks) as one:
        await until(lambda: states() == ["parked", "running", "waiting"])
        await asyncio.sleep(0.12)
        answered.set()
        await one.stop_round()
        assert events == ["0/0#0 asks", "0/0#0 has its answer", "0/1#0 has ended"], "before new prompts"
        assert one.figures()["agent/slots_freed_s_total"] > 0.1


async def test_samples_that_start_at_once_keep_their_slots_until_each_can_call():
    """verl's loops read the template in an executor, one after another: 24 take 530 ms; a slot is kept for 500 ms."""
    one_at_a_time = threading.Lock()

    def template():
        with one_at_a_time:
            threading.Event().wait(0.022)

    async def loop(server, row, params):
        await asyncio.get_running_loop().run_in_executor(None, template)
        return await says(server, row, params)

    async with training([[5]] * 24, loop, release_after_s=0.5, batch=24, slots=24) as one:
        await one.stop_round()
        assert one.figures()["agent/slots_freed_s_total"] == 0


@pytest.mark.parametrize("parked_s", [None, 10.0])
async def test_tool_within_its_deadline_is_no_stall(parked_s):
    refused = pytest.raises(RolloutFailedError, match=r"stall_s=1\); .*0/0#0 parked on w1")
    # What a busy machine takes for a turn is less than a second.
    limits = {"stall_s": 1.0, "parked_s": parked_s, "release_after_s": 0.02}
    async with training([[10]], **limits, **conversations(lambda: asyncio.sleep(1.6), [])) as one:
        with refused if parked_s is None else contextlib.nullcontext():
            await batch_of(one)


# -- tools ---------------------------------------------------------------------------------------------------------------


def run(tool, timeout_s):
    """What verl's agent loop makes of one call of ``tool`` within a sample's clock, and the errors that were noted."""
    noted = []

    async def main():
        clock = SampleClock("sample 0/0#0")
        (ours,) = timed([tool], clock, timeout_s, noted.append)
        how = {"max_tool_response_length": 100, "tool_response_truncate_side": "left"}
        loop = SimpleNamespace(tools={tool.name: ours}, **how)
        return await clock.run(ToolAgentLoop._call_tool(loop, FunctionCall(name=tool.name, arguments="{}"), {}, None))

    return asyncio.run(main()), noted


@pytest.mark.parametrize("where", ["coroutine", "thread", "create", "execute", "release"])
def test_tool_that_hangs_fails_its_sample_and_is_no_answer_in_verls_loop(where):
    functions = {"coroutine": hangs, "thread": lambda: time.sleep(0.5)}
    tool = function("add", functions[where]) if where in functions else BaseTool({}, tool_schema("add"))
    if where not in functions:
        setattr(tool, where, hangs)
    with pytest.raises(TimeoutError, match=r"tool add .* sample 0/0#0 within 0\.1 s: .*tool_timeout_s"):
        run(tool, 0.1)


class Counter(BaseTool):
    """Counts the uses that a loop tells it of."""

    limit = 3

    def __init__(self):
        super().__init__({}, tool_schema("add"))
        self.uses = 0


async def test_tool_of_a_loop_is_to_it_what_it_is_under_verl():
    def add(a):
        return a + 1

    tools = function("add", add), Counter()
    plain, counter = timed([*tools], SampleClock("sample 0/0#0"), 5.0, print)
    assert isinstance(plain, FunctionTool) and not isinstance(counter, FunctionTool)
    assert (plain.fn(1), plain.is_async, await plain.call({"a": 1})) == (2, False, 2)
    assert isinstance(counter, Counter) and isinstance(counter, BaseTool) and counter.limit == 3
    counter.uses += 1
    assert counter.uses == tools[1].uses == 1 and copy.deepcopy(counter) is counter
    assert (await counter.execute("1", {}))[0].text == "Updated the tool state."


def test_tools_own_timeout_is_its_answer_and_is_noted():
    async def times_out():
        raise TimeoutError("the sandbox is gone")

    (response, _, _), noted = run(function("add", times_out), 5.0)
    assert "the sandbox is gone" in response.text and [str(error) for error in noted] == ["the sandbox is gone"]
