"""The worker's reward calls: so many at once, and one that fails or hangs is named."""

import asyncio
import os
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker

from recipe.partial_rollout.worker.agent_loop_worker import (
    ObservedAgentLoopWorker,
    PartialRolloutAgentLoopWorker,
    RewardError,
)
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.rewards import Places, reward_places


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


def ended():
    return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=2, metrics=AgentLoopMetrics())


def build_worker(kind, places=None):
    worker = kind.__new__(kind)
    worker.config = SimpleNamespace(partial_rollout=SimpleNamespace(deadlines=SimpleNamespace(reward_s=5.0)))
    worker._rewards = Places(places)
    return worker


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

    async def score_all():
        await asyncio.gather(*[score(i) for i in range(12)])

    asyncio.run(score_all())
    assert most == 2


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
