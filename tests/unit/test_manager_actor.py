"""What driver and workers ask of the manager actor: versions, batches and steps in both placements, claims, failures.

A round that stops after each batch (colocated) takes it at the decision; one that runs on (separate) refills meanwhile.
"""

import asyncio

import pytest

from recipe.partial_rollout.checkpoint.manifest import TornCheckpointError
from recipe.partial_rollout.config.settings import FilterSettings, Mode
from recipe.partial_rollout.manager import policies
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.types import Added, Failed, Finished, Interrupted, Report
from tests.unit.shared import InProcess, settings_of

BOTH = pytest.mark.parametrize("stop", [True, False], ids=["stops", "runs on"])


def actor_of(**settings):
    actor = ManagerActor(settings_of(**settings), InProcess())
    actor.SHARE_WAIT_S = 0.05
    return actor


async def begun(prompts, *, workers=("w0",), **sizes):
    """An actor whose first worker runs what version 0 admits of 6 prompts; no more come."""
    actor = actor_of(**sizes)
    await actor.register_worker(workers[0], 8)
    await actor.begin_version(0, prompts(6), 0)
    samples = [grant.sample_id for grant in await actor.claim(workers[0])]
    for worker in workers[1:]:
        await actor.register_worker(worker, 8)
    return actor, samples


async def end(actor, output, *samples):
    await actor.report(Report("w0", [Finished(sample, output()) for sample in samples]))


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
async def test_batch_is_taken_at_its_decision_and_a_stopped_round_is_not_refilled(stop, prompts, output):
    actor, (first, second) = await begun(prompts, batch=2, mode=Mode.SSIM)
    actor.CLAIM_WAIT_S = 0.01
    waiting = await pending(actor.wait_batch(stop))
    await end(actor, output, first)
    await end(actor, output, second)
    batch = await soon(waiting)
    refilled = [grant.group_uid for grant in await actor.claim("w0")]
    await end(actor, output, "0/2#0")
    assert uids(batch.groups) == ["0/0", "0/1"] and batch.decided_at > 0
    assert refilled == ([] if stop else ["0/3"])
    ready = actor._manager.metrics()["buffer/ready_groups"]
    assert ready == 1, "what ends after the decision is of a later batch"
    if not stop:
        account, after = await actor.finish_step(uids(batch.groups)), actor._manager.metrics()
        assert account.metrics["buffer/ready_groups"] == 1 and account.admitted == [f"0/{i}" for i in range(5)]
        assert "length/batch_bias" in account.metrics and "length/batch_bias" not in after
        await actor.begin_version(1, [], 0)
        await end(actor, output, "0/3#0")
        batch = await soon(actor.wait_batch(False))
        assert (await actor.finish_step(uids(batch.groups))).admitted == ["0/5"]


async def test_next_version_of_a_stopped_round_waits_neither_for_the_update_nor_for_reports(prompts, output):
    """What is reported late has kept its slot, and is the first to get it again."""
    actor, (first, left) = await begun(prompts, n=1)
    await actor.resize_workers(2)
    await end(actor, output, first)
    batch = await soon(actor.wait_batch(True))
    assert not await actor.begin_version(1, [], 0)
    new = await actor.claim("w0")
    again = await actor.report(Report("w0", [Interrupted(left)]))
    account = await actor.finish_step(uids(batch.groups))
    assert [grant.group_uid for grant in new] == ["0/2"] and batch.carried_groups == 0
    assert [grant.sample_id for grant in again] == [left]
    now = actor._manager.metrics()
    assert account.metrics["inflight/groups"] == 1 and now["inflight/groups"] == 2, "figures before the next admission"
    assert account.metrics["length/batch_bias"] == 1, "while the trainer has the batch"
    assert account.metrics["buffer/interrupted_total"] == 1, "totals of all that is reported"


@BOTH
async def test_worker_that_dies_before_it_has_reported_holds_up_no_step_and_its_samples_go_on(stop, prompts, output):
    actor, (first, left) = await begun(prompts, workers=("w0", "w1"))
    await end(actor, output, first)
    await soon(actor.wait_batch(stop))
    assert (await soon(actor.finish_step(["0/0"]))).metrics["inflight/groups"] == 1
    await actor.begin_version(1, [], 0)
    assert await actor.release_worker("w0") == 1
    assert left in [grant.sample_id for grant in await actor.claim("w1")]


@BOTH
async def test_batch_that_completes_after_suspension_stays_for_the_checkpoint(stop, prompts, output, tmp_path):
    actor, (first, _) = await begun(prompts)
    waiting = await pending(actor.wait_batch(stop))
    await actor.suspend()
    await end(actor, output, first)
    batch = await soon(waiting)
    path = str(tmp_path / "manager.state")
    await actor.save(path)
    resumed = actor_of()
    await resumed.load(path)
    await resumed.begin_version(0, [], 0)
    batch_resumed = await soon(resumed.wait_batch(stop))
    assert batch is None and uids(batch_resumed.groups) == ["0/0"]
    assert (await soon(resumed.finish_step(["0/0"]))).admitted == ["0/0", "0/1"], "no step has told of them"


@BOTH
async def test_each_version_has_one_batch(stop, prompts, output):
    actor = actor_of()
    with pytest.raises(RuntimeError, match="wait_batch: the round is closed: call begin_version first"):
        await soon(actor.wait_batch(stop))
    actor, (first, _) = await begun(prompts)
    with pytest.raises(RuntimeError, match="the batch of version 0 is not taken: 1 cannot follow"):
        await actor.begin_version(1, [], 0)
    await end(actor, output, first)
    batch = await soon(actor.wait_batch(stop))
    with pytest.raises(RuntimeError, match=r"wait_batch: the round is .*: call begin_version first"):
        await soon(actor.wait_batch(stop))
    if not stop:
        with pytest.raises(RuntimeError, match="the batch of version 0 is not trained: 1 cannot follow"):
            await actor.begin_version(1, [], 0)
    await actor.finish_step(uids(batch.groups))
    for version in (0, 2):
        with pytest.raises(RuntimeError, match=f"{version} after 0: each version trains one batch"):
            await actor.begin_version(version, [], 0)
    assert not await actor.begin_version(1, [], 0)
    assert actor._carried == 1, "the next batch has it"


async def test_actor_answers_while_its_snapshot_is_written(tmp_path, prompts, monkeypatch):
    actor, _ = await begun(prompts)
    loop, release = asyncio.get_running_loop(), asyncio.Event()

    def slow(path, state):
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
        raise TornCheckpointError("written at last")

    monkeypatch.setattr("recipe.partial_rollout.manager.actor.write_snapshot", slow)
    saving = await pending(actor.save(str(tmp_path / "s")))
    standing = await asyncio.wait_for(actor.standing(), 1)
    release.set()
    with pytest.raises(TornCheckpointError, match="written at last"):
        await saving
    assert standing.running == 2


# -- dynamic sampling --------------------------------------------------------------------------------------------------


async def test_what_is_admitted_and_filtered_while_the_trainer_has_the_batch_is_told_with_its_step_and_once(
    prompts, output
):
    """Prompt 3 is admitted after the first batch was decided, and filtered before that batch is trained."""
    actor, _ = await begun(prompts, batch=2, n=2, mode=Mode.SSIM, group_filter=FilterSettings("reward"))
    actor.CLAIM_WAIT_S = 0.01

    async def score(group, *rewards):
        finished = [Finished(f"{group}#{i}", output(reward=reward)) for i, reward in enumerate(rewards)]
        await actor.report(Report("w0", finished))

    await score("0/0", 0, 1)
    await score("0/1", 0, 1)
    batch = await soon(actor.wait_batch(False))
    await actor.claim("w0")
    await score("0/3", 1, 1)
    await score("0/2", 1, 1)
    first = await actor.finish_step(uids(batch.groups))
    await actor.begin_version(1, [], 0)
    await actor.claim("w0")
    await score("0/4", 0, 1)
    await score("0/5", 0, 1)
    batch = await soon(actor.wait_batch(False))
    second = await actor.finish_step(uids(batch.groups))
    assert uids(first.filtered) == ["0/3", "0/2"] and second.filtered == []
    assert [*first.admitted, *second.admitted] == [f"0/{i}" for i in range(6)] and "0/3" in first.admitted


async def test_equal_group_that_is_trained_all_the_same_is_told_with_its_step_alone_after_a_resume_too(
    prompts, output, tmp_path
):
    """Three prompts, and no more: a batch of two lets one go."""
    path, equal = str(tmp_path / "manager.state"), {"batch": 2, "n": 2, "group_filter": FilterSettings("reward")}

    async def steps(actor, version, *admitted):
        await actor.register_worker("w0", 8)
        await actor.begin_version(version, *admitted)
        for grant in await actor.claim("w0"):
            await end(actor, output, grant.sample_id)
        batch = await soon(actor.wait_batch(False))
        return await actor.finish_step(uids(batch.groups))

    actor = actor_of(**equal)
    account = await steps(actor, 0, prompts(5)[:3], 0)
    assert (len(account.filtered), account.spared) == (1, 2)
    await actor.save(path)
    resumed = actor_of(**equal)
    await resumed.load(path)
    account = await steps(resumed, 1, prompts(5)[3:], 0)
    assert (len(account.filtered), account.spared) == (0, 2)


async def test_prompts_are_asked_for_when_dynamic_sampling_runs_low_and_no_version_begins_where_data_ends(prompts):
    actor = actor_of(batch=2, group_filter=FilterSettings("reward"))
    await actor.begin_version(0, prompts(4), 6)
    assert await soon(actor.wait_batch(True)) is None and await actor.wanted() == 6
    actor = actor_of(batch=2, group_filter=FilterSettings("reward"))
    exhausted, opened = await actor.begin_version(0, prompts(1), 0), actor._manager.round_open
    assert exhausted and not opened


# -- claims ------------------------------------------------------------------------------------------------------------


async def test_one_claim_grants_no_more_than_an_answer_may_carry(prompts):
    actor = actor_of(n=3)
    actor.CLAIM_SAMPLES = 4
    await actor.register_worker("w0", 8)
    await actor.begin_version(0, prompts(2), 0)
    assert [len(await soon(actor.claim("w0"))) for _ in range(2)] == [4, 2]


async def test_workers_that_wait_together_share_a_round_and_run_the_share_of_one_that_never_asks(prompts):
    actor = actor_of(batch=4, n=2, overlap=0.0)
    for i in range(4):
        await actor.register_worker(f"w{i}", 8)
    claims = [asyncio.ensure_future(actor.claim(f"w{i}")) for i in range(3)]
    await asyncio.sleep(0)
    await actor.begin_version(0, prompts(4), 0)
    sizes = [len(grants) for grants in await soon(asyncio.gather(*claims))]
    while sum(sizes) < 8:
        sizes.append(len(await soon(actor.claim("w0"))))
    assert sizes == [2, 2, 2, 1, 1]


async def test_waiting_claim_is_answered_when_its_worker_gets_more_slots(prompts):
    actor, first = await begun(prompts, batch=4, n=3, overlap=0.0)
    waiting = await pending(actor.claim("w0"))
    await actor.resize_workers(11)
    assert (len(first), len(await soon(waiting))) == (8, 3)


async def test_dead_worker_reports_nothing_and_its_claim_gets_nothing(prompts, output):
    actor = actor_of(overlap=0.0)
    await actor.register_worker("w0", 4)
    orphan = await pending(actor.claim("w0"))
    await actor.release_worker("w0")
    await actor.register_worker("w0.2", 4)
    await actor.begin_version(0, prompts(1), 0)
    with pytest.raises(RuntimeError, match="worker w0 is not registered: it was released"):
        await soon(orphan)
    (grant,) = await actor.claim("w0.2")
    with pytest.raises(RuntimeError, match="worker w0 is not registered: it was released"):
        await end(actor, output, grant.sample_id)


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_progress_is_booked_before_the_failure_and_a_backoff_beyond_the_stall_deadline_is_no_stall(
    prompts, segment, output, monkeypatch
):
    monkeypatch.setattr(policies, "RETRY_AFTER_S", 0.6)
    actor, (sample,) = await begun(prompts, overlap=0.0, stall_s=0.2)
    waiting = asyncio.ensure_future(actor.wait_batch(True))
    assert await actor.report(Report("w0", [Added(sample, [segment(5)]), Failed(sample, "boom")])) == []
    (grant,) = await soon(actor.claim("w0"))
    assert [len(s) for s in grant.segments] == [5]
    await end(actor, output, sample)
    assert uids((await soon(waiting)).groups) == ["0/0"]
