"""Between rounds: the manager prepares the next one when every worker has reported of the last, and not before."""

import asyncio
import gc

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.messages import Report


async def played(prompts, output):
    """An actor after a round of w0 and w1: w0 has finished its sample, w1 still holds one; one group is left over."""
    actor = ManagerActor(Admission(Mode.WINDOW, 1, 1, 1.0, 2, 1, 4), Scheduling(), stall_s=30.0)
    for worker in ("w0", "w1"):
        await actor.register_worker(worker, 1)
    await actor.prepare_round(0, prompts(2), True)
    (done,), (left,) = await actor.claim("w0"), await actor.claim("w1")
    await actor.report(Report("w0", finished=((done.sample_id, output()),)))
    await actor.wait_round()
    return actor, left.sample_id


def later(prompts):
    return [prompt for prompt in prompts(4) if prompt.uid > "0/1"]


def test_next_round_is_prepared_once_all_workers_have_settled(prompts, output):
    async def life():
        actor, left = await played(prompts, output)
        preparing = asyncio.ensure_future(actor.prepare_round(1, later(prompts), True))
        await actor.flushed("w0")
        await asyncio.sleep(0.01)
        waited = not preparing.done()
        await actor.report(Report("w1", interrupted=(left,)))
        await actor.flushed("w1")
        return waited, await asyncio.wait_for(preparing, 5)

    waited, start = asyncio.run(life())
    # The batch is not taken yet: its group is ready and counts.
    assert waited and start.carried_groups == 2 and start.admitted == 0


def test_figures_of_a_round_are_those_before_the_next_one_is_admitted(prompts, output):
    async def life():
        actor, _ = await played(prompts, output)
        await actor.take_batch()
        warmup = asyncio.ensure_future(actor.flush())
        preparing = asyncio.ensure_future(actor.prepare_round(1, later(prompts), True))
        await actor.flushed("w0")
        await actor.flushed("w1")
        return await asyncio.wait_for(warmup, 5), await preparing, await actor.metrics()

    flushed, start, now = asyncio.run(life())
    assert start.admitted == 1
    assert flushed.metrics["inflight/groups"] == 1 and now["inflight/groups"] == 2


def test_garbage_is_collected_between_rounds(prompts, output):
    async def life():
        actor, _ = await played(prompts, output)
        await actor.flushed("w0")
        held = gc.get_freeze_count() > 0
        await actor.flushed("w1")
        return held, gc.get_freeze_count()

    assert asyncio.run(life()) == (True, 0)


def test_dead_worker_holds_nobody_up(prompts, output):
    async def life():
        actor, left = await played(prompts, output)
        await actor.flushed("w0")
        warmup = asyncio.ensure_future(actor.flush())
        assert await actor.release_worker("w1") == 1
        await asyncio.wait_for(warmup, 5)
        await actor.prepare_round(1, [], True)
        return left, await actor.claim("w0")

    left, (grant,) = asyncio.run(life())
    assert grant.sample_id == left


def test_batch_that_is_complete_after_the_round_was_suspended_stays_where_it_is(prompts, output):
    async def life():
        actor = ManagerActor(Admission(Mode.WINDOW, 1, 1, 1.0, 2, 1, 4), Scheduling(), stall_s=30.0)
        await actor.register_worker("w0", 1)
        await actor.prepare_round(0, prompts(1), True)
        (grant,) = await actor.claim("w0")
        waiting = asyncio.ensure_future(actor.wait_round())
        await asyncio.sleep(0.01)
        await actor.suspend_round()
        await actor.flushed("w0")
        await actor.report(Report("w0", finished=((grant.sample_id, output()),)))
        ended = await asyncio.wait_for(waiting, 5)
        flushed = await asyncio.wait_for(actor.flush(), 5)
        return ended, flushed, actor._manager._state.groups.admitted

    ended, flushed, admitted = asyncio.run(life())
    assert ended.admitted == () and admitted == ["0/0"]
    assert flushed.metrics["inflight/groups"] == 1


def test_worker_that_joins_between_rounds_has_nothing_to_settle(prompts, output):
    async def life():
        actor, _ = await played(prompts, output)
        for worker in ("w0", "w1"):
            await actor.flushed(worker)
        await actor.register_worker("w2", 4)
        return await asyncio.wait_for(actor.prepare_round(1, later(prompts), True), 5)

    assert asyncio.run(life()).admitted == 0


def test_share_of_a_worker_that_never_asks_is_run_by_the_others(prompts):
    async def life():
        actor = ManagerActor(Admission(Mode.WINDOW, 4, 2, 0.0, 8, 8, 4), Scheduling(), stall_s=30.0)
        actor.SHARE_WAIT_S = 0.05
        for worker in ("w0", "w1"):
            await actor.register_worker(worker, 8)
        await actor.prepare_round(0, prompts(4), True)
        sizes = []
        while sum(sizes) < 8:
            sizes.append(len(await asyncio.wait_for(actor.claim("w0"), 5)))
        return sizes

    assert asyncio.run(life()) == [4, 2, 1, 1]


def test_workers_that_wait_together_share_a_round(prompts):
    async def life():
        actor = ManagerActor(Admission(Mode.WINDOW, 4, 2, 0.0, 8, 8, 4), Scheduling(), stall_s=30.0)
        for worker in ("w0", "w1", "w2", "w3"):
            await actor.register_worker(worker, 8)
        claims = [asyncio.ensure_future(actor.claim(f"w{i}")) for i in range(4)]
        await asyncio.sleep(0)
        await actor.prepare_round(0, prompts(4), True)
        return [len(grants) for grants in await asyncio.wait_for(asyncio.gather(*claims), 5)]

    assert asyncio.run(life()) == [2, 2, 2, 2]


def test_waiting_claim_is_answered_when_its_worker_gets_more_slots(prompts):
    async def life():
        actor = ManagerActor(Admission(Mode.WINDOW, 4, 2, 0.0, 8, 8, 4), Scheduling(), stall_s=30.0)
        await actor.register_worker("w0", 2)
        await actor.prepare_round(0, prompts(4), True)
        first = await actor.claim("w0")
        waiting = asyncio.ensure_future(actor.claim("w0"))
        await asyncio.sleep(0)
        await actor.resize_workers(5)
        return len(first), len(await asyncio.wait_for(waiting, 5))

    assert asyncio.run(life()) == (2, 3)
