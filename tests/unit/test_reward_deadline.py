"""The worker's reward calls: so many at once, one that fails or hangs is named, and the others' moments are noted."""

import asyncio
import os
import time
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker

from recipe.partial_rollout.worker.agent_loop_worker import PartialRolloutAgentLoopWorker
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.observed_worker import ObservedAgentLoopWorker, RewardError
from recipe.partial_rollout.worker.places import Places, reward_places


async def raises(*_):
    raise ZeroDivisionError("no such score")


async def hangs(*_):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "reward function failed on prompt 0/7: ZeroDivisionError: no such score"),
        (
            hangs,
            r"reward function gave no score for prompt 0/7 within 0\.05 s \(partial_rollout\.deadlines\.reward_s\)",
        ),
    ],
)
def test_reward_function_that_fails_or_hangs_is_named(monkeypatch, function, message):
    monkeypatch.setattr(AgentLoopWorker, "_compute_score", function)
    worker = ObservedAgentLoopWorker.__new__(ObservedAgentLoopWorker)
    worker.config = SimpleNamespace(partial_rollout=SimpleNamespace(deadlines=SimpleNamespace(reward_s=0.05)))
    worker._rewards = Places(None)
    with pytest.raises(RewardError, match=message):
        asyncio.run(worker._compute_score([], {"uid": "0/7"}))


async def scores(self, outputs, kwargs):
    await asyncio.sleep(0.02)
    outputs[-1].reward_score, outputs[-1].metrics.compute_score = 1.0, 0.02


async def has_a_score(self, outputs, kwargs):
    """As verl's, for an agent loop that scores itself: there is no reward call."""


def ended():
    return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=2, metrics=AgentLoopMetrics())


def build_worker(kind, places=None):
    worker = kind.__new__(kind)
    worker.config = SimpleNamespace(partial_rollout=SimpleNamespace(deadlines=SimpleNamespace(reward_s=5.0)))
    worker._scorings, worker._rewards = [], Places(places)
    return worker


def test_reward_calls_of_a_batch_are_noted_once(monkeypatch):
    monkeypatch.setattr(AgentLoopWorker, "_compute_score", scores)
    worker, before = build_worker(ObservedAgentLoopWorker), time.time()
    asyncio.run(worker._compute_score([ended()], {}))
    ((began, end),) = worker.take_scorings()
    assert before <= began <= end - 0.02 and end <= time.time()
    assert worker.take_scorings() == []


def test_reward_call_under_partial_rollout_is_noted_with_its_sample(monkeypatch):
    monkeypatch.setattr(AgentLoopWorker, "_compute_score", scores)
    worker, sample = build_worker(PartialRolloutAgentLoopWorker), LiveSample("0/7#1", keeper=None, priority=0)

    async def run(live):
        LIVE_SAMPLE.set(live)
        await worker._compute_score([ended()], {})

    asyncio.run(run(None))
    asyncio.run(run(sample))
    assert sample.scored[1] - sample.scored[0] >= 0.02
    assert worker.take_scorings() == []


def test_sample_without_a_reward_call_has_none_noted(monkeypatch):
    monkeypatch.setattr(AgentLoopWorker, "_compute_score", has_a_score)
    worker = build_worker(ObservedAgentLoopWorker)
    asyncio.run(worker._compute_score([ended()], {}))
    assert worker.take_scorings() == []


@pytest.mark.parametrize("kind", [ObservedAgentLoopWorker, PartialRolloutAgentLoopWorker])
def test_reward_call_that_queues_for_a_place_has_no_clock_running(monkeypatch, kind):
    """Twelve calls of 0.3 s on two places take 1.8 s in all; each has 1.5 s, and its sample as many between calls."""
    running = most = 0

    async def counts(self, outputs, kwargs):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.3)
        running -= 1
        outputs[-1].metrics.compute_score = 0.3

    monkeypatch.setattr(AgentLoopWorker, "_compute_score", counts)
    worker = build_worker(kind, places=2)
    worker.config.partial_rollout.deadlines.reward_s = 1.5

    async def score(i):
        sample = LiveSample(f"0/{i}#0", keeper=None, priority=0, deadline_s=1.5)
        LIVE_SAMPLE.set(sample)
        await sample.clock.run(worker._compute_score([ended()], {"uid": sample.id}))
        return sample.scored

    async def score_all():
        return await asyncio.gather(*[score(i) for i in range(12)])

    noted = asyncio.run(score_all())
    assert most == 2
    spans = worker.take_scorings() if kind is ObservedAgentLoopWorker else noted
    assert max(end - began for began, end in spans) < 1.5


def test_place_of_a_call_that_is_given_up_is_free_again():
    async def body():
        places = Places(1)

        async def hold():
            async with places.one():
                await asyncio.sleep(60)

        held, queued = asyncio.create_task(hold()), asyncio.create_task(hold())
        await asyncio.sleep(0)
        queued.cancel()
        held.cancel()
        await asyncio.wait([held, queued])
        async with asyncio.timeout(1), places.one():
            return True

    assert asyncio.run(body())


@pytest.mark.parametrize(
    ("given", "service", "workers", "nodes", "places"),
    [
        (7, False, 2, [64], 7),
        (None, True, 2, [64], None),
        (None, False, 2, [64], 4),
        (None, False, 16, [64], 1),
        (None, False, 4, [4, 64, 0], 3),
    ],
    ids=[
        "as set",
        "a service queues by itself",
        "shared by the workers",
        "at least one",
        "a quota; cores of all nodes",
    ],
)
def test_reward_calls_at_once_fit_the_cores(monkeypatch, given, service, workers, nodes, places):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": float(count)}} for count in nodes])
    config = {
        "partial_rollout": {"reward_concurrency": given},
        "reward": {"reward_model": {"enable": service}, "sandbox_fusion": {"url": None}},
        "actor_rollout_ref": {"rollout": {"agent": {"num_workers": workers}}},
    }
    assert reward_places(OmegaConf.create(config)) == places
