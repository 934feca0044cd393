"""The manager behind Ray: who waits is woken, who fails is named, and nobody waits for ever."""

import asyncio

import numpy as np
import pytest
import ray

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.messages import Report, RolloutFailedError
from recipe.partial_rollout.manager.policies import FailurePolicy
from recipe.partial_rollout.manager.types import Prompt, SampleOutput


def output_of(length=3, version=0):
    return SampleOutput(
        prompt_ids=np.ones(2, np.int32),
        response_ids=np.ones(length, np.int32),
        response_mask=np.ones(length, np.int8),
        log_probs=np.zeros(length, np.float32),
        versions=np.full(length, version, np.int32),
        segments=1,
        reward_score=1.0,
        reward_extra_info={},
        num_turns=2,
        metrics={},
    )


def prompts(count, start=0):
    return [Prompt(f"0/{i}", 0, {"index": i}) for i in range(start, start + count)]


@pytest.fixture
def start():
    actors = []

    def build(*, batch=2, n=2, overlap=1.0, stall_s=30.0, workers=(("w0", 64),), mode=Mode.WINDOW, failures=None):
        admission = Admission(mode, batch, n, overlap, 2 * batch, batch * n, 4)
        actor = ray.remote(ManagerActor).remote(admission, Scheduling(), stall_s, failures or FailurePolicy())
        actors.append(actor)
        for name, capacity in workers:
            ray.get(actor.register_worker.remote(name, capacity))
        return actor

    yield build
    for actor in actors:
        ray.kill(actor)


def test_large_claim_is_answered_in_parts(start):
    most = ManagerActor.CLAIM_SAMPLES
    actor = start(batch=1, n=most + 10, workers=(("w0", 4 * most),))
    ray.get(actor.begin_version.remote(0, prompts(2), True))
    sizes = [len(ray.get(actor.claim.remote("w0"))) for _ in range(3)]
    assert sizes == [most, most, 20]


def test_death_of_something_else_reaches_everyone_who_waits(start):
    actor = start()
    ray.get(actor.begin_version.remote(0, [], 1))
    claim, waiting = actor.claim.remote("w0"), actor.wait_batch.remote(True)
    ray.get(actor.abandon.remote("vLLM replica r0 died"))
    for ref in (claim, waiting):
        with pytest.raises(RolloutFailedError, match="vLLM replica r0 died"):
            ray.get(ref, timeout=5)


def test_death_of_the_manager_reaches_a_waiting_worker(start):
    actor = start()
    claim = actor.claim.remote("w0")
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(claim, timeout=10)


def test_a_scripted_engine_trains_every_prompt_once(start):
    """Two workers, prompts of very different lengths, ten rounds and a drain."""
    actor = start(batch=4, n=2, workers=(("w0", 6), ("w1", 6)))

    async def worker(name):
        running = held[name] = {}
        while True:
            for grant in await actor.claim.remote(name):
                running[grant.sample_id] = 1 + grant.row["index"] % 7
            while running:
                ended = tuple((sample, output_of()) for sample, left in running.items() if left == 1)
                left = {sample: left - 1 for sample, left in running.items() if left > 1}
                running.clear()
                if open_round.is_set():
                    report = Report(name, finished=ended)
                    running.update(left)
                else:
                    report = Report(name, finished=ended, interrupted=tuple(left))
                for grant in await actor.report.remote(report):
                    running[grant.sample_id] = 1 + grant.row["index"] % 7

    async def train():
        workers = [asyncio.ensure_future(worker(name)) for name in ("w0", "w1")]
        trained, offered = [], 0
        for version in range(10):
            wanted = min(await actor.wanted.remote(), 40 - offered)
            open_round.set()
            await actor.begin_version.remote(version, prompts(wanted, start=offered), offered + wanted < 40)
            offered += wanted
            batch = (await asyncio.wait_for(actor.wait_batch.remote(True), 20)).groups
            open_round.clear()
            while any(held.values()):
                await asyncio.sleep(0.001)
            for name in held:
                await actor.flushed.remote(name)
            trained += [group.uid for group in batch]
            await actor.finish_step.remote([group.uid for group in batch])
        for task in workers:
            task.cancel()
        return trained, await actor.metrics.remote()

    open_round, held = asyncio.Event(), {}
    trained, metrics = asyncio.run(train())
    assert sorted(trained) == sorted(f"0/{i}" for i in range(40))
    assert metrics["lost_samples"] == 0 and metrics["length/bias"] == pytest.approx(1.0)


def test_trainer_takes_batch_after_batch_while_samples_run_on(start):
    """Separate placement: two workers that nobody interrupts, prompts of very different lengths."""
    actor = start(batch=4, n=2, workers=(("w0", 6), ("w1", 6)))
    total, versions = 40, 10

    async def worker(name):
        running = {}
        while True:
            if running:
                await asyncio.sleep(0.002)
                ended = tuple((sample, output_of()) for sample, left in running.items() if left == 1)
                running = {sample: left - 1 for sample, left in running.items() if left > 1}
                grants = await actor.report.remote(Report(name, finished=ended))
            else:
                grants = await actor.claim.remote(name)
            running |= {grant.sample_id: 1 + grant.row["index"] % 7 for grant in grants}

    async def train():
        workers = [asyncio.ensure_future(worker(name)) for name in ("w0", "w1")]
        trained, admitted, offered = [], [], 0
        wanted = await actor.wanted.remote()
        for version in range(versions):
            first, offered = offered, min(offered + wanted, total)
            await actor.begin_version.remote(version, prompts(offered - first, start=first), total - offered)
            batch = await asyncio.wait_for(actor.wait_batch.remote(False), 20)
            uids = [group.uid for group in batch.groups]
            account = await actor.finish_step.remote(uids)
            trained += uids
            admitted += batch.admitted
            wanted = account.wanted
        for task in workers:
            task.cancel()
        return trained, admitted, account.metrics

    trained, admitted, metrics = asyncio.run(train())
    assert sorted(trained) == sorted(admitted) == sorted(f"0/{i}" for i in range(total))
    assert metrics["lost_samples"] == 0 and metrics["inflight/groups"] == 0
