"""The worker's half of claims and reports: the real worker and manager in one process, on a scripted engine.

``test_conversation_cut_anywhere`` interrupts it, and lets it die, at every moment of a conversation.
"""

import asyncio
import contextlib
import threading
import time

import pytest

from recipe.partial_rollout.config.settings import FailureLimits
from recipe.partial_rollout.manager.types import Grant, RolloutFailedError
from recipe.partial_rollout.waits import ReplicaError
from recipe.partial_rollout.worker import claim_loop
from recipe.partial_rollout.worker.live_sample import LiveSample, SampleClock
from recipe.partial_rollout.worker.rewards import RewardError
from tests.unit.loop_life import Life, config_of, living, output_of
from tests.unit.shared import hangs, lets_a_cancellation_out, state_of, tokens_in
from tests.unit.test_loops import ask, function


async def says(client, row, params):
    """As many tokens as the row says of the sample."""
    answer = await ask(client, params, row["lengths"][int(client.sample_id[-1])], [1])
    return output_of([1], answer.token_ids)


def training(lengths, loop=says, **settings):
    """A prompt for each list of ``lengths``, in an open first round; a token takes 2 ms at least."""
    rows, settings = [{"lengths": group} for group in lengths], {"config": config_of(400), "tick": 0.002, **settings}
    return living(Life(loop, rows, n=len(lengths[0]), **settings))


def batch_of(one):
    return asyncio.wait_for(one.actor.wait_batch(True), 20)


def states(one):
    return [sample.state for sample in one.actor._manager.samples.unfinished.values()]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(("failures", "masked"), [(1, False), (3, True)])
async def test_reward_that_fails_is_asked_for_again_without_the_loop_and_counts_as_retries(failures, masked):
    left, runs = [RewardError("no disk")] * failures, []

    async def loop(*given):
        runs.append(1)
        return await says(*given)

    async def score(output, row):
        if left:
            raise left.pop()
        output.reward_score = 1.0

    async with training([[5]], loop, score=score) as one:
        (output,) = await one.stop_round()
        assert (output.masked, one.engine.decoded, len(runs)) == (masked, 5, 1)
        figures = one.figures()
        assert (figures["failures/failed_total"], figures["failures/retried_total"]) == (failures, failures - masked)


async def test_interrupted_sample_goes_on_though_it_waits_and_decodes_for_longer_than_its_timeout():
    async with training([[5], [240]], sample_timeout_s=0.3) as one:
        await one.stop_round()
        await asyncio.sleep(0.4)
        await one.next_round()
        (second,) = await one.stop_round()
        assert one.engine.decoded == 245, "no token was decoded twice"
        assert second.response_length == 240 and not second.masked
        assert one.figures()["failures/failed_total"] == 0


async def test_clock_is_stopped_until_the_last_of_overlapping_waits_ends_and_then_starts_anew():
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


async def test_timeout_of_the_loops_own_stays_what_it_is_and_an_error_after_the_end_is_nobodys():
    async def loop():
        raise TimeoutError("the sandbox is gone")

    clock = SampleClock("sample 0/0#0", 60.0)
    with pytest.raises(TimeoutError, match="the sandbox is gone") as caught:
        await clock.run(loop())
    assert type(caught.value) is TimeoutError
    clock.end(ValueError("late"))


@pytest.mark.parametrize(
    ("held", "message"),
    [(True, "as held by w1, which has no conversation"), (False, "as new to w1, which still has its conversation")],
)
async def test_worker_and_manager_that_disagree_on_a_conversation_end_the_run(held, message):
    async with training([[5], [60]]) as one:
        known = "0/9#0" if held else "0/1#0"
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match=message):
            one.worker._claims.run([Grant(known, "0/1", 1, {"lengths": [5]}, (), held=held)])


async def test_tokens_of_calls_beside_each_other_are_known_as_each_is_interrupted(segment):
    first, second = asyncio.Event(), asyncio.Event()

    async def twice(client, row, params):
        sample = client._sample

        async def call(turn, interrupted):
            async with sample.keeper.engine_call(sample):
                await interrupted.wait()
                sample.add(turn, segment(3))
                sample.keeper.release_slot(sample)

        await asyncio.gather(*[call(sample.start_turn(1), moment) for moment in (first, second)])
        await hangs()

    async with training([[5]], twice) as one:
        (sample,) = one.actor._manager.samples.unfinished.values()
        for count, moment in enumerate((first, second), 1):
            moment.set()
            await until(lambda count=count: [segment.turn for segment in sample.segments] == [*range(count)])
        assert sample.failures == 0


async def test_sample_that_no_round_comes_for_ends_the_run_by_its_deadline(monkeypatch):
    monkeypatch.setattr(claim_loop, "GRANT_S", 0.2)
    async with training([[5], [60]]) as one:
        await one.stop_round()
        await asyncio.sleep(0.4)
        with pytest.raises(RolloutFailedError, match=r"sample 0/1#0 was not granted a slot in an .* 0\.2 s; is the"):
            await batch_of(one)


def failing(how, times=1):
    """A loop that fails ``times`` times in sample 0/0#0 before its first engine call, by awaiting ``how()``."""
    left = [how] * times

    async def loop(client, row, params):
        if client.sample_id == "0/0#0" and left:
            await left.pop()()
        return await says(client, row, params)

    return loop


async def refused(dead=False):
    """The replica's answer to a request."""
    raise ReplicaError("vLLM replica r0 failed on request 0/0#0@1: ValueError: no such token", dead=dead)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (refused, "no such token"),
        (lets_a_cancellation_out, "CancelledError"),
        (hangs, "SampleTimeoutError: the agent loop of sample 0/0#0"),
    ],
)
async def test_sample_that_fails_is_run_again_and_masked_where_it_always_fails(how, said):
    async with training([[5, 5]], failing(how), sample_timeout_s=0.3) as one:
        assert [output.response_length for output in await one.stop_round()] == [5, 5]
        figures = one.figures()
        assert (figures["failures/retried_total"], figures["failures/masked_total"]) == (1, 0)
    async with training([[5, 5]], failing(how, times=99), sample_timeout_s=0.3) as one:
        outputs = await one.stop_round()
        assert [output.masked for output in outputs] == [True, False] and one.figures()["failures/masked_total"] == 1
        assert said in outputs[0].extra_fields["sample_error"]


@pytest.mark.parametrize(
    ("dead", "retries", "said"),
    [
        (False, None, r"sample 0/0#0 on w1 failed: ReplicaError: .* no such token"),
        # Whatever failures do.
        (True, 1, r"^ReplicaError: vLLM replica r0 failed"),
    ],
    ids=["a living replica refuses", "the last replica dies"],
)
async def test_replica_that_fails_a_request_ends_the_run(dead, retries, said):
    failures = FailureLimits(sample_retries=retries)
    async with training([[5, 5]], failing(lambda: refused(dead)), failures=failures) as one:
        with pytest.raises(RolloutFailedError, match=said):
            await batch_of(one)


async def test_output_that_no_checkpoint_can_hold_ends_the_run_if_it_is_the_first_or_is_a_failed_sample():
    def scores(unsaveable):
        async def score(output, row):
            output.reward_score = 1.0
            if output.extra_fields["sample"] == unsaveable:
                output.extra_fields["reward_extra_info"] = {"verdict": object()}

        return score

    async def named(client, row, params):
        output = await says(client, row, params)
        output.extra_fields["sample"] = client.sample_id
        return output

    async with training([[5, 60]], named, score=scores("0/0#0"), save_freq=1) as one:
        with pytest.raises(RolloutFailedError, match=r"0/0#0\.reward_extra_info\.verdict: .* cannot be saved"):
            await batch_of(one)
    for save_freq in (1, -1):
        async with training([[5, 60]], named, score=scores("0/0#1"), save_freq=save_freq) as one:
            assert [output.masked for output in await one.stop_round()] == [False, save_freq > 0]


@pytest.mark.parametrize("after_s", [60.0, 0.0], ids=["at the end of the round", "before it"])
async def test_turn_is_known_while_its_reward_call_goes_on_and_its_slot_may_be_anothers(after_s):
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


def buys(buy):
    """A loop that makes seven tokens and then calls the tool ``buy``, whose errors are its affair."""

    async def loop(client, row, params):
        output = await says(client, row, params)
        await asyncio.wait([asyncio.ensure_future(row["tools"]["buy"].call({}))])
        return output

    return {"loop": loop, "functions": [function("buy", buy)]}


async def test_first_traceback_of_a_tool_that_raises_is_known_though_its_error_is_the_answer():
    async def buy():
        raise KeyError("no such shop")

    async with training([[7, 7, 7]], **buys(buy)) as one, asyncio.timeout(20):
        while not (errors := await one.actor.first_errors()):
            await asyncio.sleep(0.002)
        assert len(errors) == 1 and "KeyError: 'no such shop'" in errors[0] and "in buy" in errors[0]


def conversations(answer, events=None):
    """A loop whose samples of 10 tokens make them in two turns with a tool call between them, which awaits ``answer()``."""
    events = [] if events is None else events

    async def look(name):
        events.append(f"{name} asks")
        await answer()
        events.append(f"{name} has its answer")
        return "4"

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


async def test_slot_of_a_sample_in_a_tool_is_anothers_and_it_comes_back_before_new_prompts():
    events, answered = [], asyncio.Event()
    talks = conversations(answered.wait, events)
    async with training([[10], [120], [5]], slots=1, release_after_s=0.02, **talks) as one:
        await until(lambda: states(one) == ["away", "running", "waiting"])
        await asyncio.sleep(0.12)
        answered.set()
        await one.stop_round()
        assert events == ["0/0#0 asks", "0/0#0 has its answer", "0/1#0 has ended"]
        assert one.figures()["agent/slots_freed_s_total"] > 0.1


async def test_samples_that_start_at_once_keep_their_slots_while_each_waits_for_the_others_to_start(monkeypatch):
    """16 take 160 ms to be made; a slot is kept for 50 ms."""

    def slow(*args, **kwargs):
        time.sleep(0.01)
        return LiveSample(*args, **kwargs)

    monkeypatch.setattr(claim_loop, "LiveSample", slow)
    async with training([[5]] * 16, release_after_s=0.05, batch=16) as one:
        await one.stop_round()
        assert one.figures()["agent/slots_freed_s_total"] == 0


async def test_samples_that_start_at_once_keep_their_slots_while_each_waits_for_the_others_chat_templates():
    """verl's loops read the template in an executor, one after another: 24 take 120 ms; a slot is kept for 50 ms."""
    one_at_a_time = threading.Lock()

    def template():
        with one_at_a_time:
            time.sleep(0.005)

    async def loop(server, row, params):
        await asyncio.get_running_loop().run_in_executor(None, template)
        return await says(server, row, params)

    async with training([[5]] * 24, loop, release_after_s=0.05, batch=24, slots=24) as one:
        await one.stop_round()
        assert one.figures()["agent/slots_freed_s_total"] == 0


async def test_slot_is_kept_for_ever_if_asked():
    async with training(
        [[10], [5]], slots=1, release_after_s=float("inf"), **conversations(lambda: asyncio.sleep(0.1))
    ) as one:
        while not one.actor._manager.round_complete():
            assert "away" not in states(one)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("away_s", [None, 10.0])
async def test_tool_within_its_deadline_is_no_stall(away_s):
    refused = pytest.raises(RolloutFailedError, match=r"stall_s=1\); .*0/0#0 away on w1")
    # What a busy machine takes for a turn is less than a second.
    limits = {"stall_s": 1.0, "away_s": away_s, "release_after_s": 0.02}
    async with training([[10]], **limits, **conversations(lambda: asyncio.sleep(1.6))) as one:
        with refused if away_s is None else contextlib.nullcontext():
            await batch_of(one)
