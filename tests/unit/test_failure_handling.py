"""A sample that fails is retried from its journal, masked, or ends the run; a checkpoint keeps all of it."""

import asyncio

import numpy as np
import pytest

from recipe.partial_rollout.checkpoint.snapshot import TornCheckpointError
from recipe.partial_rollout.config.choices import Mode, OnSampleError
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.messages import Report
from recipe.partial_rollout.manager.policies import FailurePolicy
from recipe.partial_rollout.manager.types import Progress
from tests.unit.shared import begin

RETRY_ONCE = FailurePolicy(OnSampleError.RETRY, sample_retries=1, retry_backoff_s=0.02)


def one_running(manager, **kwargs):
    m = manager(batch=1, n=1, overlap=0.0, workers=2, **kwargs)
    begin(m)
    (grant,) = m.claim("w0")
    return m, grant.sample_id


def test_sample_retries_that_are_negative_are_refused_and_backoff_doubles_with_each_failure():
    with pytest.raises(ValueError, match=r"partial_rollout.failures.sample_retries=-1: at least 0"):
        FailurePolicy(sample_retries=-1)
    assert [FailurePolicy(retry_backoff_s=0.5).delay_s(k) for k in (1, 2, 3)] == [0.5, 1.0, 2.0]


# -- state_dict --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 2}, r"data.train_batch_size=2: 1, which the checkpoint was made with"),
        ({"n": 3}, r"actor_rollout_ref.rollout.n=3: 1, which"),
        ({"max_staleness": 3}, r"partial_rollout.max_staleness=3: at least 4, which"),
        ({"layout": 1}, "manager state has layout=1: this version of the recipe reads 2"),
        ({"tokens": np.zeros(4, np.int32)}, "tokens has 4 entries: 5 by its lengths"),
    ],
)
def test_state_of_other_sizes_or_of_another_layout_is_refused(manager, segment, sizes, message):
    m, sample_id = one_running(manager)
    m.add_segment(sample_id, segment(5))
    state = m.state_dict()
    own = {"batch": 1, "n": 1, "prompts": 0} | {key: size for key, size in sizes.items() if key not in state}
    with pytest.raises(ValueError, match=message):
        manager(**own).load_state_dict({**state, **sizes})


def test_state_is_loaded_before_the_first_prompt_under_the_same_or_a_larger_bound(manager, prompts):
    m, _ = one_running(manager)
    with pytest.raises(RuntimeError, match="the manager has prompts already"):
        manager(batch=1, n=1).load_state_dict(m.state_dict())
    fresh = manager(batch=1, n=1, max_staleness=5, prompts=0)
    fresh.load_state_dict(m.state_dict())
    assert fresh.metrics()["inflight/groups"] == 1
    with pytest.raises(RuntimeError, match=r"prompt 0/0 was offered twice, or out of order: the last one was 0/99"):
        fresh.offer(prompts(1))
    fresh.offer(prompts(1, start=100))


def test_next_version_that_has_begun_is_not_saved_before_the_batch_is_trained(manager, output):
    """A restored run would have to train that batch again, under a version that is gone."""
    m, sample_id = one_running(manager)
    m.finish(sample_id, output())
    m.take_batch(stop=True)
    m.state_dict()
    begin(m)
    with pytest.raises(RuntimeError, match="version 1 has begun, the batch before it is not trained: too early"):
        m.state_dict()


def test_state_is_a_moment_that_later_verbs_do_not_change(manager, segment):
    m, sample_id = one_running(manager)
    captured = m.capture()
    m.add_segment(sample_id, segment(5))
    m.add_tool_result(sample_id, {})
    assert [(s.segments, s.tool_results) for g in captured.groups for s in g.samples] == [([], [])]


# -- the actor ---------------------------------------------------------------------------------------------------------


def actor_of(failures=RETRY_ONCE, stall_s=30.0):
    return ManagerActor(Admission(Mode.WINDOW, 1, 1, 0.0, 2, 1, 4), Scheduling(), stall_s, failures)


async def one_claimed(actor, prompts):
    await actor.register_worker("w0", 4)
    await actor.begin_version(0, prompts(1), False)
    (grant,) = await actor.claim("w0")
    return grant.sample_id


async def test_report_books_progress_before_the_failure_and_retries_after_the_backoff(prompts, segment):
    actor = actor_of()
    sample_id = await one_claimed(actor, prompts)
    progress = Progress(sample_id, (segment(5),), ({"text": "42"},))
    assert await actor.report(Report("w0", progress=[progress], failed=[(sample_id, "boom")])) == []
    (grant,) = await asyncio.wait_for(actor.claim("w0"), 5)
    assert [len(s) for s in grant.segments] == [5] and grant.tool_results == ({"text": "42"},)


async def test_backoff_longer_than_the_stall_deadline_is_no_stall(prompts, output):
    actor = actor_of(FailurePolicy(retry_backoff_s=0.6), stall_s=0.2)
    sample_id = await one_claimed(actor, prompts)
    waiting = asyncio.ensure_future(actor.wait_batch(True))
    await actor.report(Report("w0", failed=[(sample_id, "boom")]))
    (grant,) = await asyncio.wait_for(actor.claim("w0"), 5)
    await actor.report(Report("w0", finished=[(grant.sample_id, output())]))
    assert (await asyncio.wait_for(waiting, 5)).admitted == ("0/0",)


async def test_dead_worker_reports_nothing_and_its_claim_takes_nothing_from_its_successor(prompts, output):
    actor = actor_of()
    await actor.register_worker("w0", 4)
    orphan = asyncio.ensure_future(actor.claim("w0"))
    await asyncio.sleep(0)
    await actor.release_worker("w0")
    await actor.register_worker("w0", 4)
    await actor.begin_version(0, prompts(1), False)
    assert await asyncio.wait_for(orphan, 5) == []
    (grant,) = await actor.claim("w0")
    await actor.release_worker("w0")
    with pytest.raises(RuntimeError, match="worker w0 is not registered: it was released"):
        await actor.report(Report("w0", finished=[(grant.sample_id, output())]))


async def test_actor_answers_while_its_snapshot_is_written(tmp_path, prompts, monkeypatch):
    actor = actor_of()
    await one_claimed(actor, prompts)
    loop, release = asyncio.get_running_loop(), asyncio.Event()

    def slow(path, state):
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
        raise TornCheckpointError("written at last")

    monkeypatch.setattr("recipe.partial_rollout.manager.actor.write_snapshot", slow)
    saving = asyncio.ensure_future(actor.save(str(tmp_path / "s")))
    await asyncio.sleep(0.05)
    figures = await asyncio.wait_for(actor.metrics(), 1)
    release.set()
    with pytest.raises(TornCheckpointError, match="written at last"):
        await saving
    assert figures["inflight/groups"] == 1
