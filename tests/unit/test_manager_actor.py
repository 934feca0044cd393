"""What driver and workers ask of the manager actor: versions, batches and steps in both placements, claims, failures.

A round that stops after each batch (colocated) takes it at the decision; one that runs on (separate) refills meanwhile.
"""

import asyncio

import pytest

from recipe.partial_rollout.checkpoint.manifest import CheckpointError
from recipe.partial_rollout.config.settings import FilterSettings, Mode
from recipe.partial_rollout.manager import policies
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.types import Added, Failed, Finished, Report
from tests.unit.shared import InProcess, settings_of

BOTH = pytest.mark.parametrize("stop", [True, False], ids=["stops", "runs on"])
GONE = "worker w0 is not registered: it was released"


def actor_of(**settings):
    return ManagerActor(settings_of(**settings), InProcess())


async def begun(prompts, *, count=6, left=0, **sizes):
    """An actor whose worker runs what version 0 admits of so many prompts; no more come."""
    actor = actor_of(**sizes)
    await actor.register_worker("w0", 8)
    await actor.begin_version(0, prompts(count), left)
    return actor, [lease.sample_id for lease in await actor.claim("w0")]


async def end(actor, output, *samples, rewards=(1.0,)):
    rewards = rewards * len(samples) if len(rewards) == 1 else rewards
    finished = [Finished(sample, output(reward=reward)) for sample, reward in zip(samples, rewards, strict=True)]
    return await actor.report(Report("w0", finished))


def soon(awaitable):
    return asyncio.wait_for(awaitable, 5)


async def pending(awaitable):
    """The task of ``awaitable``, which still waits after a moment."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0.01)
    assert not task.done()
    return task


def uids(groups):
    return [group.uid for group in groups]


# -- versions, batches and steps ---------------------------------------------------------------------------------------


@BOTH
async def test_batch_is_taken_at_its_decision_and_a_stopped_round_has_no_refill(stop, prompts, output):
    actor, (first, second) = await begun(prompts, batch=2, mode=Mode.SSIM)
    actor.CLAIM_WAIT_S = 0.01
    waiting = await pending(actor.wait_batch(stop))
    await end(actor, output, first)
    await end(actor, output, second)
    assert await soon(waiting)
    batch = await actor.batch()
    with pytest.raises(RuntimeError, match="batch: no batch is taken: call wait_batch first"):
        await actor.batch()
    refilled = [lease.group_uid for lease in await actor.claim("w0")]
    await end(actor, output, "0/2#0")
    assert uids(batch.groups) == ["0/0", "0/1"] and batch.decided_at > 0
    assert refilled == ([] if stop else ["0/3"]), "what ends after the decision is of a later batch"
    account, after = await actor.finish_step(), actor._manager.metrics()
    assert account.admitted == [f"0/{i}" for i in range(3 if stop else 5)]
    assert (account.metrics["buffer/ready_groups"], after["buffer/ready_groups"]) == (0, 1), "as of the decision"
    assert "length/batch_bias" in account.metrics and "length/batch_bias" not in after, "while the trainer has it"


async def test_batch_that_completes_after_suspension_stays_for_the_checkpoint(prompts, output):
    actor, (first, _) = await begun(prompts)
    waiting = await pending(actor.wait_batch(True))
    await actor.suspend()
    assert await soon(waiting) is False, "at once: no report has come"
    await end(actor, output, first)
    assert (await actor.progress()).ready_groups == 1


@BOTH
async def test_each_version_has_one_batch(stop, prompts, output):
    actor = actor_of()
    with pytest.raises(RuntimeError, match="wait_batch: the version is closed, not open: call begin_version first"):
        await soon(actor.wait_batch(stop))
    actor, (first, _) = await begun(prompts)
    with pytest.raises(RuntimeError, match="the batch of version 0 is not taken: 1 cannot follow"):
        await actor.begin_version(1, [], 0)
    await end(actor, output, first)
    await soon(actor.wait_batch(stop))
    with pytest.raises(RuntimeError, match=r"wait_batch: the version is .*, not open: call begin_version first"):
        await soon(actor.wait_batch(stop))
    if not stop:
        with pytest.raises(RuntimeError, match="the batch of version 0 is not trained: 1 cannot follow"):
            await actor.begin_version(1, [], 0)
    await actor.finish_step()
    for version in (0, 2):
        with pytest.raises(RuntimeError, match=f"{version} cannot follow 0: each batch raises the version by one"):
            await actor.begin_version(version, [], 0)
    assert not await actor.begin_version(1, [], 0)


async def test_actor_answers_while_its_snapshot_is_written(tmp_path, prompts, monkeypatch):
    actor, _ = await begun(prompts)
    loop, release = asyncio.get_running_loop(), asyncio.Event()

    def slow(path, state):
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
        raise CheckpointError("written at last")

    monkeypatch.setattr("recipe.partial_rollout.manager.actor.write_snapshot", slow)
    saving = await pending(actor.save(str(tmp_path / "s")))
    assert (await asyncio.wait_for(actor.progress(), 1)).running == 2
    release.set()
    with pytest.raises(CheckpointError, match="written at last"):
        await saving


# -- dynamic sampling --------------------------------------------------------------------------------------------------


async def test_prompts_are_wanted_when_few_are_left_and_none_begin_at_the_end(prompts):
    actor, _ = await begun(prompts, count=4, left=6, batch=2, group_filter=FilterSettings("reward"))
    assert await soon(actor.wait_batch(True)) is False and await actor.wanted() == 6
    actor = actor_of(batch=2, group_filter=FilterSettings("reward"))
    exhausted, opened = await actor.begin_version(0, prompts(1), 0), actor._manager.round_open
    assert exhausted and not opened


# -- claims ------------------------------------------------------------------------------------------------------------


async def test_waiting_claim_gets_new_slots_and_no_more_than_an_answer_may_carry(prompts):
    actor, first = await begun(prompts, batch=4, n=3, overlap=0.0)
    actor.CLAIM_SAMPLES = 2
    waiting = await pending(actor.claim("w0"))
    await actor.resize_workers(11)
    assert (len(first), len(await soon(waiting)), len(await soon(actor.claim("w0")))) == (8, 2, 1)


async def test_dead_worker_reports_nothing_and_its_claim_gets_nothing(prompts, output):
    actor = actor_of(overlap=0.0)
    await actor.register_worker("w0", 4)
    orphan = await pending(actor.claim("w0"))
    await actor.release_worker("w0")
    await actor.register_worker("w0.2", 4)
    await actor.begin_version(0, prompts(1), 0)
    with pytest.raises(RuntimeError, match=GONE):
        await soon(orphan)
    (lease,) = await actor.claim("w0.2")
    with pytest.raises(RuntimeError, match=GONE):
        await end(actor, output, lease.sample_id)


async def test_progress_counts_before_the_failure_and_a_long_backoff_is_no_stall(prompts, segment, output, monkeypatch):
    monkeypatch.setattr(policies, "RETRY_AFTER_S", 0.6)
    actor, (sample,) = await begun(prompts, overlap=0.0, stall_s=0.2)
    waiting = asyncio.ensure_future(actor.wait_batch(True))
    assert await actor.report(Report("w0", [Added(sample, [segment(5)]), Failed(sample, "boom")])) == []
    (lease,) = await soon(actor.claim("w0"))
    assert [len(s) for s in lease.segments] == [5]
    await end(actor, output, sample)
    assert await soon(waiting) and uids((await actor.batch()).groups) == ["0/0"]
