"""The worker's half of claims and reports: the real worker and manager in one process, on a scripted replica."""

import asyncio
import gc
import time
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.admission import Admission, Mode
from recipe.partial_rollout.bench.scripted_engine import ScriptedWorker
from recipe.partial_rollout.manager_actor import ManagerActor
from recipe.partial_rollout.manager_messages import RolloutFailedError
from recipe.partial_rollout.planner.engine_curve import EngineCurve
from recipe.partial_rollout.scheduling import Policy
from recipe.partial_rollout.types import Grant, Prompt

CURVE = EngineCurve(step_s=0.002, sample_s=0.0)


class Local:
    """An actor handle without Ray; ``broken`` verbs raise instead."""

    def __init__(self, actor):
        self.actor = actor
        self.broken = {}

    def __getattr__(self, verb):
        async def call(*arguments):
            if verb in self.broken:
                raise self.broken[verb]
            return await getattr(self.actor, verb)(*arguments)

        return SimpleNamespace(remote=call)


async def start(lengths, *, batch=1, grant_s=60.0):
    """A manager with a prompt for each list of ``lengths``, and the worker that serves it, in an open first round."""
    n = len(lengths[0])
    admission = Admission(Mode.WINDOW, batch, n, len(lengths) / batch - 1, batch, batch * n, max_staleness=4)
    manager = Local(ManagerActor(admission, Policy.BOUNDED, stall_s=30.0))
    worker = ScriptedWorker(CURVE, 1)
    worker.config.partial_rollout.deadlines.grant_s = grant_s
    worker.setup("w0", manager, 16, {})
    serving = asyncio.create_task(worker.serve())
    await asyncio.sleep(0.01)
    worker.begin(0, time.monotonic())
    prompts = [Prompt(f"0/{i}", 0, {"lengths": group}) for i, group in enumerate(lengths)]
    await manager.actor.prepare_round(0, prompts, False)
    return manager, worker, serving


async def finish_round(manager, worker):
    await asyncio.wait_for(manager.actor.wait_round(), 20)
    worker.close_round()
    worker.interrupt()
    await asyncio.wait_for(worker.quiesce(), 20)
    groups = await manager.actor.take_batch()
    await manager.actor.acknowledge([group.uid for group in groups])
    return groups


def test_probe_is_preceded_by_a_few_tokens_in_every_slot():
    class Recording(ScriptedWorker):
        async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name, trace=True, **kwargs):
            seen.append((sampling_params, kwargs["length"]))

    seen = []
    asyncio.run(Recording(CURVE, 1).warm_up([{"lengths": 50}, {"lengths": 60}], 3))
    assert seen == [({"max_tokens": 8}, length) for length in (50, 60, 50)]


def test_garbage_is_collected_once_everything_is_reported():
    async def body():
        manager, worker, serving = await start([[5]])
        held = gc.get_freeze_count() > 0
        await asyncio.wait_for(manager.actor.wait_round(), 20)
        # The manager, here in the same process, would release it too.
        manager.broken["settled"] = RuntimeError("not heard")
        with pytest.raises(RuntimeError, match="not heard"):
            await asyncio.wait_for(worker.quiesce(), 20)
        serving.cancel()
        return held, gc.get_freeze_count()

    assert asyncio.run(body()) == (True, 0)


def test_interrupted_sample_goes_on_in_its_worker_from_where_it_was():
    async def body():
        manager, worker, serving = await start([[5], [60]])
        (first,) = await finish_round(manager, worker)
        (waiting,) = manager.actor._manager._state.samples.values()
        cached = waiting.cached_tokens
        worker.begin(1, time.monotonic())
        await manager.actor.prepare_round(1, [], False)
        (second,) = await finish_round(manager, worker)
        serving.cancel()
        return first, cached, second, worker.decoded()

    first, cached, second, decoded = asyncio.run(body())
    assert first.outputs[0].response_length == 5 and 0 < cached < 60
    assert second.outputs[0].response_length == 60 and decoded == 65, "no token was decoded twice"


def test_samples_are_ready_before_their_round_opens():
    async def body():
        manager, worker, serving = await start([[5, 5], [60, 60]])
        await finish_round(manager, worker)
        decoded, collected = worker.decoded(), worker.ready()
        # The trainer updates; the samples of the round to come wait at the gate.
        await manager.actor.prepare_round(1, [], False)
        await asyncio.sleep(0.05)
        before = worker.ready(), worker.decoded() - decoded
        worker.begin(1, time.monotonic())
        await asyncio.sleep(0.05)
        after, waited = worker.ready(), worker.waited()
        await finish_round(manager, worker)
        serving.cancel()
        return collected, before, after, waited

    collected, before, after, (_, _, slots) = asyncio.run(body())
    assert collected == 0 and before == (2, 0) and after == 0 and slots == 2


def test_report_that_fails_ends_the_worker_at_once():
    async def body():
        manager, _worker, serving = await start([[5]])
        manager.broken["report"] = RuntimeError("the report was refused")
        # A claim that waits must not hide it.
        with pytest.raises(RuntimeError, match="the report was refused"):
            await asyncio.wait_for(serving, 5)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("held", "message"),
    [(True, "w0 has lost the conversation that the manager thinks it holds"), (False, "w0 still has the conversation")],
)
def test_worker_and_manager_that_disagree_on_a_conversation_end_the_run(held, message):
    async def body():
        _manager, worker, serving = await start([[5], [500]])
        known = "0/9#0" if held else "0/1#0"
        await asyncio.sleep(0.05)
        serving.cancel()
        with pytest.raises(RuntimeError, match=message):
            worker._run([Grant(known, "0/1", 1, {"lengths": [5]}, (), held=held)])

    asyncio.run(body())


def test_sample_that_no_round_comes_for_ends_the_run_by_its_deadline():
    async def body():
        manager, worker, serving = await start([[5], [60]], grant_s=0.2)
        await finish_round(manager, worker)
        await asyncio.sleep(0.4)
        with pytest.raises(RolloutFailedError, match=r"sample 0/1#0 was not granted a slot in an .* 0\.2 s.*grant_s"):
            await asyncio.wait_for(manager.actor.wait_round(), 5)
        serving.cancel()

    asyncio.run(body())
