"""The worker's half of claims and reports: the real worker and manager in one process, on a scripted replica.

``test_conversation_cut_anywhere`` interrupts it, and lets it die, at every moment of a conversation.
"""

import asyncio
import contextlib
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import ToolResponse

from recipe.partial_rollout.config.settings import FailureLimits, ToolCalls
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.types import Grant, Prompt, RolloutFailedError
from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve
from recipe.partial_rollout.waits import ReplicaError
from recipe.partial_rollout.worker import claim_loop
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE
from recipe.partial_rollout.worker.rewards import RewardError
from recipe.partial_rollout.worker.tool_journal import journaled
from tests.bench.scripted_engine import ScriptedWorker, output_of
from tests.unit.shared import InProcess, Local, hangs, lets_a_cancellation_out, settings_of, tokens_in

CURVE = EngineCurve(step_s=0.002, sample_s=0.0)
NO_LIMIT = contextlib.nullcontext()
RETRY = FailureLimits(sample_retries=1)


class AfterTurn(ScriptedWorker):
    """Samples of 7 tokens end in a call that does not: of the reward function, or of ``tool``."""

    tool = None

    async def _run_agent_loop(self, sampling_params, trajectory, **kwargs):
        output = await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        if output.response_length != 7:
            return output
        if self.tool is not None:
            await self.tool.call({})
        said = AgentLoopOutput(
            prompt_ids=[1], response_ids=[0] * 7, response_mask=[1] * 7, num_turns=2, metrics=AgentLoopMetrics()
        )
        return await self._agent_loop_postprocess(said, False)

    async def _compute_score(self, outputs, kwargs):
        await hangs()


@contextlib.asynccontextmanager
async def life(
    lengths,
    *,
    kind=ScriptedWorker,
    slots=16,
    sample_s=None,
    release_after_s=0.1,
    save_freq=-1,
    failures=RETRY,
    stall_s=30.0,
    away_s=None,
):
    """A manager with a prompt for each list of ``lengths``, and the worker that serves it, in an open first round."""
    n = len(lengths[0])
    overlap = len(lengths) - 1
    limits = {"failures": failures, "stall_s": stall_s, "away_s": away_s}
    settings = settings_of(1, n, overlap=overlap, max_staleness=max(4, overlap), **limits)
    manager = Local(ManagerActor(settings, InProcess()))
    worker = kind(CURVE, 1)
    worker.config.partial_rollout.failures.sample_timeout_s = sample_s
    worker.config.trainer.save_freq = save_freq
    worker.config.partial_rollout.tools = ToolCalls(release_after_s)
    worker.connect("w0", manager, slots, {})
    serving = asyncio.create_task(worker.serve())
    await asyncio.sleep(0.01)
    worker.begin(0, time.monotonic())
    prompts = [Prompt(f"0/{i}", {"lengths": group}) for i, group in enumerate(lengths)]
    await manager.actor.begin_version(0, prompts, False)
    try:
        yield manager, worker
    finally:
        serving.cancel()


def scored(*failures):
    """A worker whose reward raises ``failures`` first, for all samples together."""

    left = list(failures)

    class Scored(ScriptedWorker):
        loops = 0

        async def _run_agent_loop(self, *args, **kwargs):
            self.loops += 1
            output = await super()._run_agent_loop(*args, **kwargs)
            said = AgentLoopOutput(
                prompt_ids=[1], response_ids=[0], response_mask=[0], num_turns=2, metrics=AgentLoopMetrics()
            )
            await self._score(said, kwargs)
            return replace(output, reward_score=said.reward_score)

        async def _compute_score(self, outputs, kwargs):
            if left:
                raise left.pop(0)
            outputs[0].reward_score = 1.0

    return Scored


@pytest.mark.parametrize(("failures", "masked"), [(1, False), (3, True)])
async def test_reward_that_fails_is_asked_for_again_without_the_loop_and_counts_as_retries(failures, masked):
    errors = [RewardError("no disk") for _ in range(failures)]
    async with life([[5]], kind=scored(*errors), failures=FailureLimits(sample_retries=2)) as (manager, worker):
        ((output,),) = [group.outputs for group in await finish_round(manager, worker)]
        assert (output.masked, worker.decoded(), worker.loops) == (masked, 5, 1)
        figures = manager.actor._manager.metrics()
        assert (figures["failures/failed_total"], figures["failures/retried_total"]) == (failures, failures - masked)


async def finish_round(manager, worker):
    batch = await asyncio.wait_for(manager.actor.wait_batch(True), 20)
    worker.close_round()
    worker.interrupt()
    await asyncio.wait_for(worker.flush(), 20)
    await manager.actor.finish_step([group.uid for group in batch.groups])
    return batch.groups


async def test_interrupted_sample_goes_on_though_it_waits_and_decodes_for_longer_than_its_timeout():
    async with life([[5], [120]], sample_s=0.1) as (manager, worker):
        await finish_round(manager, worker)
        await asyncio.sleep(0.3)
        worker.begin(1, time.monotonic())
        await manager.actor.begin_version(1, [], False)
        (second,) = await finish_round(manager, worker)
        assert worker.decoded() == 125, "no token was decoded twice"
        assert second.outputs[0].response_length == 120 and not second.outputs[0].masked
        assert manager.actor._manager.metrics()["failures/failed_total"] == 0


@pytest.mark.parametrize(
    ("held", "message"),
    [(True, "w0 has lost the conversation that the manager thinks it holds"), (False, "w0 still has the conversation")],
)
async def test_worker_and_manager_that_disagree_on_a_conversation_end_the_run(held, message):
    async with life([[5], [500]]) as (_, worker):
        known = "0/9#0" if held else "0/1#0"
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match=message):
            worker._claims.run([Grant(known, "0/1", 1, {"lengths": [5]}, (), held=held)])


async def test_sample_that_no_round_comes_for_ends_the_run_by_its_deadline(monkeypatch):
    monkeypatch.setattr(claim_loop, "GRANT_S", 0.2)
    async with life([[5], [60]]) as (manager, worker):
        await finish_round(manager, worker)
        await asyncio.sleep(0.4)
        with pytest.raises(RolloutFailedError, match=r"sample 0/1#0 was not granted a slot in an .* 0\.2 s; is the"):
            await asyncio.wait_for(manager.actor.wait_batch(True), 5)


def failing(how, times=1):
    """A worker in which sample 0/0#0 fails ``times`` times before its first engine call, by awaiting ``how()``."""

    class Failing(ScriptedWorker):
        left = times

        async def _run_agent_loop(self, *args, **kwargs):
            if LIVE_SAMPLE.get().id == "0/0#0" and Failing.left:
                Failing.left -= 1
                await how()
            return await super()._run_agent_loop(*args, **kwargs)

    return Failing


async def refused(dead=False):
    """The replica's answer to a request."""
    raise ReplicaError("vLLM replica r0 failed on request 0/0#0@1: ValueError: no such token", dead=dead)


async def play(kind, failures=RETRY, *, lengths=(5, 5), **settings):
    """One round of one prompt with two samples; its two outputs and the manager's figures."""
    async with life([lengths], kind=kind, failures=failures, **settings) as (manager, worker):
        (group,) = await finish_round(manager, worker)
        return group.outputs, manager.actor._manager.metrics()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (refused, "no such token"),
        (lets_a_cancellation_out, "CancelledError"),
        (hangs, "SampleTimeoutError: the agent loop of sample 0/0#0"),
    ],
)
async def test_sample_that_fails_is_run_again_and_masked_where_it_always_fails(how, said):
    outputs, figures = await play(failing(how), sample_s=0.1)
    assert [output.response_length for output in outputs] == [5, 5]
    assert (figures["failures/retried_total"], figures["failures/masked_total"]) == (1, 0)
    outputs, figures = await play(failing(how, times=99), sample_s=0.1)
    assert [output.masked for output in outputs] == [True, False] and figures["failures/masked_total"] == 1
    assert said in outputs[0].extra_fields["sample_error"]


@pytest.mark.parametrize(
    ("dead", "failures", "said"),
    [
        (False, FailureLimits(sample_retries=None), r"sample 0/0#0 on w0 failed: ReplicaError: .* no such token"),
        # Whatever failures do.
        (True, RETRY, r"^ReplicaError: vLLM replica r0 failed"),
    ],
    ids=["a living replica refuses", "the last replica dies"],
)
async def test_replica_that_fails_a_request_ends_the_run(dead, failures, said):
    with pytest.raises(RolloutFailedError, match=said):
        await play(failing(lambda: refused(dead)), failures)


def unsaveable(sample_id):
    """A worker in which the reward of ``sample_id`` comes with what no checkpoint can hold."""

    class Unsaveable(ScriptedWorker):
        async def _run_agent_loop(self, *args, **kwargs):
            output = await super()._run_agent_loop(*args, **kwargs)
            named = LIVE_SAMPLE.get().id == sample_id
            return replace(output, reward_extra_info={"verdict": object()}) if named else output

    return Unsaveable


async def test_output_that_no_checkpoint_can_hold_ends_the_run_if_it_is_the_first_or_is_a_failed_sample():
    with pytest.raises(RolloutFailedError, match=r"sample 0/0#0\.reward_extra_info\.verdict: .* cannot be saved"):
        await play(unsaveable("0/0#0"), lengths=[5, 60], save_freq=1)
    for save_freq in (1, -1):
        outputs, _ = await play(unsaveable("0/0#1"), lengths=[5, 60], save_freq=save_freq)
        assert [output.masked for output in outputs] == [False, save_freq > 0]


@pytest.mark.parametrize("after_s", [60.0, 0.0], ids=["at the end of the round", "before it"])
async def test_turn_is_known_while_its_reward_call_goes_on_and_its_slot_may_be_anothers(after_s):
    slots = 2 if after_s else 1
    async with life([[7], [60]], kind=AfterTurn, release_after_s=after_s, slots=slots) as (manager, worker):
        await asyncio.sleep(0.1)
        assert tokens_in(manager.actor._manager) == (0 if after_s else 7)
        (group,) = await finish_round(manager, worker)
        rows = [each for row in manager.actor._manager.state_dict()["groups"] for each in row["samples"]]
        saved = [(len(made["token_ids"]), made["stop_reason"]) for each in rows for made in each["segments"]]
        assert (group.uid, worker.decoded()) == ("0/1", 67)
        assert saved == [(7, "completed")]


def tool_of(function, name="buy"):
    (tool,) = journaled([FunctionTool(name=name, fn=function, tool_schema=None, is_async=True)])
    return tool


async def test_turn_and_tool_call_are_known_before_the_tool_is_called_and_outlive_the_worker():
    calls = []

    async def buy():
        calls.append(tokens_in(manager.actor._manager))
        await asyncio.sleep(60)
        return ToolResponse(text="bought"), 0.0, {}

    class Buying(AfterTurn):
        tool = tool_of(buy)

    async with life([[7]], kind=Buying) as (manager, _):
        await asyncio.sleep(0.1)
        await manager.actor.release_worker("w0")
        await manager.actor.register_worker("w1", 16)
        (grant,) = await asyncio.wait_for(manager.actor.claim("w1"), 5)
        assert calls == [7], "the tool is called once, and the manager knew of the turn by then"
        assert [len(segment) for segment in grant.segments] == [7]
        (started,) = grant.tool_results
        assert (started["call"], started["tool"], started["started"]) == (0, "buy", True)


async def test_tool_is_not_called_where_the_manager_refuses_to_know_of_it():
    calls = []

    async def buy():
        calls.append(1)

    class Buying(AfterTurn):
        tool = tool_of(buy)

    async with life([[7]], kind=Buying) as (manager, worker):
        manager.broken["report"] = RuntimeError("worker w0 is not registered")
        with pytest.raises(RuntimeError, match="w0 is not registered"):
            await asyncio.wait_for(worker.serve(), 5)
    assert calls == []


def conversations(tool_s, *, events=None, places=NO_LIMIT):
    """A worker whose samples of 10 tokens make them in two turns with a tool call between them."""
    events = [] if events is None else events

    async def look(name):
        async with places:
            events.append(f"{name} asks")
            await asyncio.sleep(tool_s)
            events.append(f"{name} has its answer")
        return "4"

    class Conversations(ScriptedWorker):
        async def _run_agent_loop(self, sampling_params, trajectory, *, length, **kwargs):
            sample = LIVE_SAMPLE.get()
            if length != [10]:
                output = await super()._run_agent_loop(sampling_params, trajectory, length=length, **kwargs)
            else:
                tool = tool_of(look, "look")
                await self._turn(sample, 5)
                await tool.call({"name": sample.id})
                await self._turn(sample, 5, 5)
                output = output_of(10, self._version)
            events.append(f"{sample.id} has ended")
            return output

    return Conversations


async def test_slot_of_a_sample_in_a_tool_is_anothers_and_it_comes_back_before_new_prompts():
    events = []
    kind = conversations(0.15, events=events)
    async with life([[10], [120], [5]], kind=kind, slots=1, release_after_s=0.02) as (manager, worker):
        await asyncio.sleep(0.1)
        states = [sample.state for sample in manager.actor._manager.samples.unfinished.values()]
        assert states == ["away", "running", "waiting"]
        await finish_round(manager, worker)
        assert events == ["0/0#0 asks", "0/0#0 has its answer", "0/1#0 has ended"]
        assert manager.actor._manager.metrics()["agent/slots_freed_s_total"] > 0.1


async def test_tool_may_hold_places_of_its_own_and_who_waits_for_one_holds_no_slot():
    events = []
    kind = conversations(0.2, events=events, places=asyncio.Semaphore(1))
    async with life([[10], [10], [300]], kind=kind, slots=1, release_after_s=0.02) as (manager, worker):
        await asyncio.sleep(0.15)
        states = [sample.state for sample in manager.actor._manager.samples.unfinished.values()]
        assert states == ["away", "away", "running"]
        await finish_round(manager, worker)
        assert events[:2] == ["0/0#0 asks", "0/0#0 has its answer"]


async def test_first_traceback_of_a_tool_that_raises_is_known_though_its_error_is_the_answer():
    async def buy():
        raise KeyError("no such shop")

    class Buying(AfterTurn):
        tool = SimpleNamespace(call=lambda parameters: asyncio.wait([asyncio.ensure_future(_buy.call(parameters))]))

    _buy = tool_of(buy)
    async with life([[7, 7, 7]], kind=Buying) as (manager, _):
        while not (errors := await manager.actor.first_errors()):
            await asyncio.sleep(0.01)
        assert len(errors) == 1 and "KeyError: 'no such shop'" in errors[0] and "in buy" in errors[0]


async def test_slot_is_kept_for_ever_if_asked():
    async with life([[10], [5]], kind=conversations(0.1), slots=1, release_after_s=float("inf")) as (manager, _):
        while not manager.actor._manager.round_complete():
            assert "away" not in [sample.state for sample in manager.actor._manager.samples.unfinished.values()]
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("away_s", [None, 10.0])
async def test_tool_within_its_deadline_is_no_stall(away_s):
    refused = pytest.raises(RolloutFailedError, match=r"stall_s=0\.3\); .*0/0#0 away on w0")
    settings = {"stall_s": 0.3, "away_s": away_s, "release_after_s": 0.02}
    async with life([[10]], kind=conversations(0.6), **settings) as (manager, worker):
        with refused if away_s is None else contextlib.nullcontext():
            await finish_round(manager, worker)
