"""The worker's half of claims and reports: the real worker and manager in one process, on a scripted replica."""

import asyncio
import contextlib
import time
from dataclasses import replace

import numpy as np
import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import ToolResponse

from recipe.partial_rollout.config.choices import Mode, OnSampleError
from recipe.partial_rollout.config.sections import Scheduling, ToolCalls
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.messages import RolloutFailedError
from recipe.partial_rollout.manager.policies import FailurePolicy
from recipe.partial_rollout.manager.types import Grant, Prompt, Segment
from recipe.partial_rollout.planner.engine_curve import EngineCurve
from recipe.partial_rollout.waits import ReplicaError
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample, ProbeSlots
from recipe.partial_rollout.worker.replica_choice import ReplicaChoice
from recipe.partial_rollout.worker.tool_journal import journaled
from tests.bench.scripted_engine import ScriptedWorker, output_of
from tests.unit.shared import Local

CURVE = EngineCurve(step_s=0.002, sample_s=0.0)


RETRY = FailurePolicy(OnSampleError.RETRY, sample_retries=1, retry_backoff_s=0.01)


def seven_tokens():
    """What an agent loop makes of one turn."""
    return AgentLoopOutput(
        prompt_ids=[1],
        response_ids=[0] * 7,
        response_mask=[1] * 7,
        response_logprobs=[0.0] * 7,
        num_turns=2,
        metrics=AgentLoopMetrics(),
    )


class AfterTurn(ScriptedWorker):
    """Samples of 7 tokens end in a call that does not: of the reward function, or of ``tool``."""

    def __init__(self, curve, replicas, tool=None):
        super().__init__(curve, replicas)
        self.tool = tool

    async def _run_agent_loop(self, sampling_params, trajectory, **kwargs):
        output = await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        if output.response_length != 7:
            return output
        if self.tool is not None:
            await self.tool.call({})
        return await self._agent_loop_postprocess(seven_tokens(), False)

    async def _compute_score(self, outputs, kwargs):
        await asyncio.sleep(60)


async def start(
    lengths,
    *,
    batch=1,
    slots=16,
    grant_s=60.0,
    sample_s=None,
    failures=RETRY,
    kind=ScriptedWorker,
    save_freq=-1,
    stall_s=30.0,
    away_s=None,
    release_after_s=0.1,
):
    """A manager with a prompt for each list of ``lengths``, and the worker that serves it, in an open first round."""
    n = len(lengths[0])
    admission = Admission(Mode.WINDOW, batch, n, len(lengths) / batch - 1, batch, batch * n, max_staleness=4)
    manager = Local(ManagerActor(admission, Scheduling(), stall_s, failures, away_s=away_s))
    worker = kind(CURVE, 1)
    worker.config.partial_rollout.deadlines.grant_s = grant_s
    worker.config.partial_rollout.failures.sample_timeout_s = sample_s
    worker.config.trainer.save_freq = save_freq
    worker.config.partial_rollout.tools = ToolCalls(release_after_s)
    worker.connect("w0", manager, slots, ReplicaChoice({}))
    serving = asyncio.create_task(worker.serve())
    await asyncio.sleep(0.01)
    worker.begin(0, time.monotonic())
    prompts = [Prompt(f"0/{i}", 0, {"lengths": group}) for i, group in enumerate(lengths)]
    await manager.actor.begin_version(0, prompts, False)
    return manager, worker, serving


def lived(body, lengths, **options):
    """What ``body`` of a manager and its worker returns."""

    async def run():
        manager, worker, serving = await start(lengths, **options)
        try:
            return await body(manager, worker)
        finally:
            serving.cancel()

    return asyncio.run(run())


async def finish_round(manager, worker):
    batch = await asyncio.wait_for(manager.actor.wait_batch(True), 20)
    worker.close_round()
    worker.interrupt()
    await asyncio.wait_for(worker.flush(), 20)
    await manager.actor.finish_step([group.uid for group in batch.groups])
    return batch.groups


@pytest.mark.parametrize(("loaded", "agent"), [((), "scripted"), (("a tool",), "single_turn_agent")])
def test_probe_is_preceded_by_a_few_tokens_in_every_slot_and_calls_no_tools(loaded, agent):
    class Recording(ScriptedWorker):
        tools = loaded

        async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name, trace=True, **kwargs):
            seen.append((sampling_params, kwargs["length"], agent_name))

    seen = []
    asyncio.run(Recording(CURVE, 1).warm_up([{"lengths": 50}, {"lengths": 60}], 3))
    assert seen == [({"max_tokens": 8}, length, agent) for length in (50, 60, 50)]


def test_interrupted_sample_goes_on_in_its_worker_from_where_it_was():
    groups = {}

    class Noting(ScriptedWorker):
        async def _run_agent_loop(self, *args, **kwargs):
            groups[LIVE_SAMPLE.get().id] = LIVE_SAMPLE.get().group
            return await super()._run_agent_loop(*args, **kwargs)

    async def body(manager, worker):
        (first,) = await finish_round(manager, worker)
        (waiting,) = manager.actor._manager.unfinished.values()
        cached = waiting.cached_tokens
        worker.begin(1, time.monotonic())
        await manager.actor.begin_version(1, [], False)
        (second,) = await finish_round(manager, worker)
        return first, cached, second, worker.decoded()

    first, cached, second, decoded = lived(body, [[5], [60]], kind=Noting)
    assert groups == {"0/0#0": "0/0", "0/1#0": "0/1"}
    assert first.outputs[0].response_length == 5 and 0 < cached < 60
    assert second.outputs[0].response_length == 60 and decoded == 65, "no token was decoded twice"


def test_samples_are_ready_before_their_round_opens():
    async def body(manager, worker):
        await finish_round(manager, worker)
        decoded, collected = worker.decoded(), worker.ready()
        # The trainer updates; the samples of the round to come wait at the gate.
        await manager.actor.begin_version(1, [], False)
        await asyncio.sleep(0.05)
        before = worker.ready(), worker.decoded() - decoded
        worker.begin(1, time.monotonic())
        await asyncio.sleep(0.05)
        after, waited = worker.ready(), worker.waited()
        await finish_round(manager, worker)
        return collected, before, after, waited

    collected, before, after, (_, _, slots) = lived(body, [[5, 5], [60, 60]])
    assert collected == 0 and before == (2, 0) and after == 0 and slots == 2


@pytest.mark.parametrize(
    ("held", "message"),
    [(True, "w0 has lost the conversation that the manager thinks it holds"), (False, "w0 still has the conversation")],
)
def test_worker_and_manager_that_disagree_on_a_conversation_end_the_run(held, message):
    async def body(_manager, worker):
        known = "0/9#0" if held else "0/1#0"
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match=message):
            worker._claims.run([Grant(known, "0/1", 1, {"lengths": [5]}, (), held=held)])

    lived(body, [[5], [500]])


def test_sample_that_no_round_comes_for_ends_the_run_by_its_deadline():
    async def body(manager, worker):
        await finish_round(manager, worker)
        await asyncio.sleep(0.4)
        with pytest.raises(RolloutFailedError, match=r"sample 0/1#0 was not granted a slot in an .* 0\.2 s.*grant_s"):
            await asyncio.wait_for(manager.actor.wait_batch(True), 5)

    lived(body, [[5], [60]], grant_s=0.2)


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


async def cancelled():
    """The loop lets out the cancellation of something that it awaited."""
    call = asyncio.ensure_future(asyncio.sleep(60))
    await asyncio.sleep(0)
    call.cancel()
    await call


async def hangs():
    await asyncio.sleep(60)


def play(kind, failures, *, lengths=(5, 5), **settings):
    """One round of one prompt with two samples; its two outputs and the manager's figures."""

    async def body(manager, worker):
        (group,) = await finish_round(manager, worker)
        return group.outputs, manager.actor._manager.metrics()

    return lived(body, [lengths], kind=kind, failures=failures, **settings)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (refused, "no such token"),
        (cancelled, "CancelledError"),
        (hangs, "SampleTimeoutError: the agent loop of sample 0/0#0"),
    ],
)
def test_sample_that_fails_is_run_again_and_masked_where_it_always_fails(how, said):
    outputs, figures = play(failing(how), RETRY, sample_s=0.1)
    assert [output.response_length for output in outputs] == [5, 5]
    assert (figures["failures/retried_total"], figures["failures/masked_total"]) == (1, 0)
    outputs, figures = play(failing(how, times=99), RETRY, sample_s=0.1)
    assert [output.masked for output in outputs] == [True, False] and figures["failures/masked_total"] == 1
    assert said in outputs[0].extra_fields["sample_error"]


@pytest.mark.parametrize(
    ("dead", "failures", "said"),
    [
        (False, FailurePolicy(OnSampleError.RAISE), r"sample 0/0#0 on w0 failed: ReplicaError: .* no such token"),
        # Whatever failures do.
        (True, RETRY, r"^ReplicaError: vLLM replica r0 failed"),
    ],
    ids=["a living replica refuses", "the last replica dies"],
)
def test_replica_that_fails_a_request_ends_the_run(dead, failures, said):
    with pytest.raises(RolloutFailedError, match=said):
        play(failing(lambda: refused(dead)), failures)


def unsaveable(sample_id):
    """A worker in which the reward of ``sample_id`` comes with what no checkpoint can hold."""

    class Unsaveable(ScriptedWorker):
        async def _run_agent_loop(self, *args, **kwargs):
            output = await super()._run_agent_loop(*args, **kwargs)
            named = LIVE_SAMPLE.get().id == sample_id
            return replace(output, reward_extra_info={"verdict": object()}) if named else output

    return Unsaveable


def test_output_that_no_checkpoint_can_hold_ends_the_run_if_it_is_the_first_or_is_a_failed_sample():
    with pytest.raises(RolloutFailedError, match=r"sample 0/0#0\.reward_extra_info\.verdict: .* cannot be saved"):
        play(unsaveable("0/0#0"), RETRY, lengths=[5, 60], save_freq=1)
    for save_freq in (1, -1):
        outputs, _ = play(unsaveable("0/0#1"), RETRY, lengths=[5, 60], save_freq=save_freq)
        assert [output.masked for output in outputs] == [False, save_freq > 0]


def test_sample_may_wait_for_its_round_and_decode_for_longer_than_its_timeout():
    async def body(manager, worker):
        await finish_round(manager, worker)
        await asyncio.sleep(0.3)
        worker.begin(1, time.monotonic())
        await manager.actor.begin_version(1, [], False)
        (second,) = await finish_round(manager, worker)
        return second.outputs[0], manager.actor._manager.metrics()

    output, figures = lived(body, [[5], [120]], sample_s=0.1)
    assert output.response_length == 120 and not output.masked and figures["failures/failed_total"] == 0


@pytest.mark.parametrize("after_s", [60.0, 0.0], ids=["at the end of the round", "before it"])
def test_turn_is_known_while_its_reward_call_goes_on_and_its_slot_may_be_anothers(after_s):
    async def body(manager, worker):
        await asyncio.sleep(0.1)
        state = manager.actor._manager
        before = state.groups.cached_tokens
        (group,) = await finish_round(manager, worker)
        saved = state.state_dict()["calls"]
        return before, group.uid, worker.decoded(), saved["length"].tolist(), saved["stop_reason"]

    options = {"release_after_s": after_s, "slots": 2 if after_s else 1}
    before, *others = lived(body, [[7], [60]], kind=AfterTurn, **options)
    assert before == (0 if after_s else 7) and others == ["0/1", 67, [7], ["completed"]]


async def test_turn_and_tool_call_are_known_before_the_tool_is_called_and_outlive_the_worker():
    calls = []

    async def buy():
        calls.append(manager_of[0].groups.cached_tokens)
        await asyncio.sleep(60)
        return ToolResponse(text="bought"), 0.0, {}

    (tool,) = journaled([FunctionTool(name="buy", fn=buy, tool_schema=None, is_async=True)])
    manager_of = []
    manager, _worker, serving = await start([[7]], kind=lambda *a: AfterTurn(*a, tool=tool))
    manager_of.append(manager.actor._manager)
    await asyncio.sleep(0.1)
    serving.cancel()
    await manager.actor.release_worker("w0")
    await manager.actor.register_worker("w1", 16)
    (grant,) = await asyncio.wait_for(manager.actor.claim("w1"), 5)
    assert calls == [7], "the tool is called once, and the manager knew of the turn by then"
    assert [len(segment) for segment in grant.segments] == [7]
    assert grant.tool_results == ({"call": 0, "started": "buy"},)


def conversations(events, tool_s, *, beside=False):
    """A worker whose samples of 10 tokens make them in two turns with a tool call between them; ``beside``: meanwhile."""

    async def look(name):
        events.append(f"{name} asks")
        await asyncio.sleep(tool_s)
        events.append(f"{name} has its answer")
        return "4"

    class Conversations(ScriptedWorker):
        async def _run_agent_loop(self, sampling_params, trajectory, *, length, **kwargs):
            sample = LIVE_SAMPLE.get()
            if length[int(sample.id[-1])] != 10:
                output = await super()._run_agent_loop(sampling_params, trajectory, length=length, **kwargs)
            else:
                plain = FunctionTool(name="look", fn=look, tool_schema=None, is_async=True)
                (tool,) = journaled([plain], limits=self.config.partial_rollout.tools)
                await self._turn(sample, 5)
                call = asyncio.ensure_future(tool.call({"name": sample.id}))
                await (asyncio.sleep(0) if beside else call)
                await self._turn(sample, 5, 5)
                await call
                output = output_of(10, self._version)
            events.append(f"{sample.id} has ended")
            return output

    return Conversations


def test_slot_of_a_sample_in_a_tool_is_anothers_and_it_comes_back_before_new_prompts():
    async def body(manager, worker):
        await asyncio.sleep(0.1)
        states = [sample.state for sample in manager.actor._manager.unfinished.values()]
        await finish_round(manager, worker)
        return states, manager.actor._manager.metrics()

    events = []
    states, figures = lived(body, [[10], [120], [5]], kind=conversations(events, 0.15), slots=1, release_after_s=0.02)
    assert states == ["away", "running", "waiting"]
    assert events == ["0/0#0 asks", "0/0#0 has its answer", "0/1#0 has ended"]
    assert figures["agent/slots_freed_s_total"] > 0.1


def test_tool_goes_on_while_the_trainer_updates_and_its_result_is_there_when_the_next_round_opens():
    async def body(manager, worker):
        (first,) = await finish_round(manager, worker)
        made = worker.decoded()
        await asyncio.sleep(0.4)
        (sample,) = manager.actor._manager.unfinished.values()
        waiting = sample.state, [set(result) for result in sample.tool_results]
        await manager.actor.begin_version(1, [], False)
        worker.begin(1, time.monotonic())
        (second,) = await finish_round(manager, worker)
        return first.uid, second.uid, waiting, worker.decoded() - made

    events = []
    first, second, waiting, made = lived(body, [[10], [40]], kind=conversations(events, 0.3), release_after_s=0.02)
    assert (first, second, made) == ("0/1", "0/0", 5), "the round ended without it, and no token was decoded twice"
    assert waiting == ("interrupted", [{"call", "started"}, {"call", "text", "reward"}])
    assert events.count("0/0#0 asks") == 1


@pytest.mark.parametrize(("after_s", "beside"), [(float("inf"), False), (0.005, True)], ids=["inf", "used meanwhile"])
def test_slot_is_kept_for_ever_if_asked_and_while_the_sample_decodes_beside_its_tool(after_s, beside):
    async def body(manager, _worker):
        seen = []
        while not manager.actor._manager.round_complete():
            seen += [sample.state for sample in manager.actor._manager.unfinished.values()]
            await asyncio.sleep(0.005)
        return seen

    kind = conversations([], 0.1, beside=beside)
    assert "away" not in lived(body, [[10], [5]], kind=kind, slots=1, release_after_s=after_s)


@pytest.mark.parametrize("away_s", [None, 10.0])
def test_tool_within_its_deadline_is_no_stall(away_s):
    refused = pytest.raises(RolloutFailedError, match=r"stall_s=0\.3\); .*0/0#0 away on w0")
    with refused if away_s is None else contextlib.nullcontext():
        kind = conversations([], 0.6)
        (group,) = lived(finish_round, [[10]], kind=kind, stall_s=0.3, away_s=away_s, release_after_s=0.02)
        assert group.uid == "0/0"


async def test_tool_is_not_called_where_the_manager_refuses_to_know_of_it():
    calls = []

    async def buy():
        calls.append(1)

    (tool,) = journaled([FunctionTool(name="buy", fn=buy, tool_schema=None, is_async=True)])
    manager, _worker, serving = await start([[7]], kind=lambda *a: AfterTurn(*a, tool=tool))
    manager.broken["report"] = RuntimeError("worker w0 is not registered")
    with pytest.raises(RuntimeError, match="w0 is not registered"):
        await asyncio.wait_for(serving, 5)
    assert calls == []


def test_long_reward_call_of_the_probe_is_nobodys_progress():
    class Probed(AfterTurn):
        async def _compute_score(self, outputs, kwargs):
            LIVE_SAMPLE.get().start_turn(1)
            LIVE_SAMPLE.get().add(Segment(np.zeros(7, np.int32), np.zeros(7, np.float32), 0, "completed"))
            await asyncio.sleep(0.05)

    async def body(_manager, worker):
        LIVE_SAMPLE.set(LiveSample("probe-0", keeper=ProbeSlots(), priority=0))
        await worker._agent_loop_postprocess(seven_tokens(), False)
        worker._claims._outbox.raise_error()

    lived(body, [[60]], kind=Probed, release_after_s=0.0)
