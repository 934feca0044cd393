"""Separate placement behind the actor: the trainer takes batch after batch while the samples of its workers run on."""

import asyncio

import pytest

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.failure_policy import FailurePolicy
from recipe.partial_rollout.manager.group_filter import GroupFilter
from recipe.partial_rollout.manager.messages import PromptsWanted, Report, RolloutFailedError
from recipe.partial_rollout.manager.types import Progress
from recipe.partial_rollout.records.ledger import Ledger, RunSizes
from recipe.partial_rollout.records.trained_group import TrainedGroup
from recipe.partial_rollout.tools.audit import audit


def actor_of(*, batch=1, n=1, overlap=1.0, mode=Mode.WINDOW, in_flight=2, stall_s=30.0, group_filter=None):
    admission = Admission(mode, batch, n, overlap, 2 * batch, in_flight, 4)
    return ManagerActor(admission, Scheduling(), stall_s, FailurePolicy(), group_filter)


async def begun(prompts, **sizes):
    """An actor whose worker runs what version 0 admits of 4 prompts; 6 more can come."""
    actor = actor_of(**sizes)
    await actor.register_worker("w0", 8)
    await actor.next_version(0, prompts(4), 6)
    return actor, await actor.claim("w0")


def soon(awaitable):
    return asyncio.wait_for(awaitable, 5)


def played(life):
    return asyncio.run(life())


def uids(groups):
    return [group.uid for group in groups]


def test_batch_is_handed_over_while_the_other_samples_run(prompts, output, segment):
    async def life():
        actor, (first, second) = await begun(prompts)
        waiting = asyncio.ensure_future(actor.next_batch())
        await asyncio.sleep(0.01)
        waited = not waiting.done()
        await actor.report(Report("w0", finished=((first.sample_id, output(7)),)))
        batch = await soon(waiting)
        await actor.report(Report("w0", progress=(Progress(second.sample_id, (segment(3),)),)))
        account = await actor.finish_step(uids(batch))
        await actor.next_version(1, [], 6)
        await actor.report(Report("w0", finished=((second.sample_id, output(5)),)))
        return waited, batch, account, await soon(actor.next_batch()), actor

    waited, batch, account, after, actor = played(life)
    assert waited and uids(batch) == ["0/0"] and batch[0].outputs[0].response_length == 7
    assert account.admitted == ("0/0", "0/1") and account.filtered == ()
    assert account.wanted == 0 and account.metrics["inflight/groups"] == 1
    assert account.metrics["length/bias"] == account.metrics["length/batch_bias"] == 1
    assert uids(after) == ["0/1"] and actor._manager.counters.interrupted == 0


def test_slots_that_come_free_are_filled_while_the_trainer_has_its_batch(prompts, output):
    async def life():
        actor, (first, _) = await begun(prompts, mode=Mode.SSIM)
        claim = asyncio.ensure_future(actor.claim("w0"))
        await actor.report(Report("w0", finished=((first.sample_id, output()),)))
        await asyncio.sleep(0.01)
        complete = not claim.done()
        await actor.next_batch()
        return complete, await soon(claim)

    complete, grants = played(life)
    assert complete and [grant.group_uid for grant in grants] == ["0/2"]


def test_each_version_has_one_batch(prompts, output):
    async def life():
        actor = actor_of()
        with pytest.raises(RuntimeError, match="next_batch: the round is closed: call begin_version first"):
            await soon(actor.next_batch())
        await actor.register_worker("w0", 8)
        await actor.next_version(0, prompts(4), 0)
        for grant in await actor.claim("w0"):
            await actor.report(Report("w0", finished=((grant.sample_id, output()),)))
        batch = await actor.next_batch()
        with pytest.raises(RuntimeError, match="next_batch: the round is ahead: call begin_version first"):
            await soon(actor.next_batch())
        with pytest.raises(RuntimeError, match="the batch of version 0 is not trained: 1 cannot follow"):
            await actor.next_version(1, [], 0)
        await actor.finish_step(uids(batch))
        return await actor.next_version(1, [], 0)

    start = played(life)
    assert (start.admitted, start.carried_groups, start.exhausted) == (1, 1, False)


def test_batch_that_does_not_come_ends_the_run_with_the_samples_awaited(prompts):
    async def life():
        actor, _ = await begun(prompts, stall_s=0.2)
        await soon(actor.next_batch())

    with pytest.raises(RolloutFailedError, match=r"deadlines.stall_s=0.2.*0/0#0 running on w0"):
        played(life)


def test_failure_reaches_the_trainer_that_waits_for_its_batch(prompts):
    async def life():
        actor, _ = await begun(prompts)
        waiting = asyncio.ensure_future(actor.next_batch())
        await asyncio.sleep(0)
        await actor.abandon("vLLM replica r0 died")
        await soon(waiting)

    with pytest.raises(RolloutFailedError, match="vLLM replica r0 died"):
        played(life)


def test_stopped_trainer_gets_no_batch(prompts, output):
    async def life():
        actor, (first, _) = await begun(prompts)
        waiting = asyncio.ensure_future(actor.next_batch())
        await asyncio.sleep(0)
        await actor.suspend_round()
        await actor.report(Report("w0", finished=((first.sample_id, output()),)))
        return await soon(waiting), await actor.metrics()

    groups, metrics = played(life)
    assert groups == [] and metrics["buffer/ready_groups"] == 1


def test_data_that_ends_short_of_a_batch_starts_no_version(prompts):
    async def life():
        actor = actor_of(batch=2, group_filter=GroupFilter("reward", 0))
        return await actor.next_version(0, prompts(1), 0), actor._manager.round_open

    start, opened = played(life)
    assert start.exhausted and not opened


def test_trainer_is_asked_for_prompts_when_dynamic_sampling_runs_low(prompts):
    async def life():
        actor = actor_of(batch=2, group_filter=GroupFilter("reward", 0))
        await actor.next_version(0, prompts(4), 6)
        return await soon(actor.next_batch())

    assert played(life) == PromptsWanted(6)


PROMPTS, STEPS = 12, 6


class Process:
    """A driver that trains steps of 2 groups of 2, and its two workers, whose samples take 1 or 12 turns of a token."""

    def __init__(self, run_dir, prompts, output, segment):
        self.path, self.ledger = str(run_dir / "manager.state"), Ledger(run_dir)
        self.prompts, self.output, self.segment = prompts, output, segment
        self.actor = actor_of(batch=2, n=2)
        self.actor.CLAIM_WAIT_S = 0.01
        self.alive = True
        self.offered = 0
        self.ledger.run(RunSizes("PR", 2, 2, 4, PROMPTS, PROMPTS, PROMPTS))

    async def resume(self, step):
        restored = await self.actor.load(self.path)
        self.offered = int(self.actor._manager._state.reserve.last_offered[2:]) + 1
        self.ledger.resumed(step)
        return restored

    async def train(self, steps, *, dies_in=None):
        """Train ``steps``; die in ``dies_in`` with its batch at the trainer and the other samples running."""
        workers = [asyncio.create_task(self.work(name)) for name in ("w0", "w1")]
        for step in steps:
            count = min(await self.actor.wanted(), PROMPTS - self.offered)
            rows = self.prompts(count, start=self.offered)
            self.offered += count
            await self.actor.next_version(step - 1, rows, PROMPTS - self.offered)
            batch = await soon(self.actor.next_batch())
            await asyncio.sleep(0)
            if step == dies_in:
                break
            account = await self.actor.finish_step(uids(batch))
            self.ledger.admitted(step, step - 1, account.admitted)
            self.ledger.trained(step, step - 1, [TrainedGroup.of(group, step - 1) for group in batch])
            await self.save(step)
        self.alive = False
        await asyncio.gather(*workers)

    async def save(self, step):
        await self.actor.save(self.path)
        self.ledger.checkpoint(step)

    async def work(self, name):
        await self.actor.register_worker(name, 3)
        left = {}
        while self.alive:
            grants = await self.turn(name, left) if left else await self.actor.claim(name)
            left |= {grant.sample_id: 1 + 11 * (grant.order % 2) for grant in grants}
            await asyncio.sleep(0)

    async def turn(self, name, left):
        """Every sample gets a token; those that end are reported with what the others have made."""
        version = self.actor._manager.version
        ended = tuple((sample, self.output(version=version)) for sample in left if left[sample] == 1)
        for sample, _ in ended:
            del left[sample]
        left |= {sample: turns - 1 for sample, turns in left.items()}
        progress = tuple(Progress(sample, (self.segment(1, version=version),)) for sample in left)
        return await self.actor.report(Report(name, progress=progress, finished=ended))


@pytest.mark.parametrize("saved_with_the_trainer", [False, True])
def test_run_that_dies_while_its_batch_trains_and_samples_run_trains_every_prompt_once(
    saved_with_the_trainer, tmp_path, prompts, output, segment
):
    """It resumes from the step before, whose checkpoint was made before or after the batch was taken."""

    async def life():
        first = Process(tmp_path, prompts, output, segment)
        await first.train([1, 2, 3], dies_in=3)
        if saved_with_the_trainer:
            await first.save(2)
        second = Process(tmp_path, prompts, output, segment)
        restored = await second.resume(2)
        await second.train(range(3, STEPS + 1))
        second.ledger.complete()
        return restored

    restored = played(life)
    result, _ = audit(tmp_path)
    assert result.violations == [] and len(result.trained.once) == PROMPTS
    assert restored.groups == (4 if saved_with_the_trainer else 2) and restored.unfinished_samples
