"""The worker's reward calls: so many at once, one that fails or hangs is named, and a dead reward worker costs no score."""

import asyncio
import os
from types import SimpleNamespace

import pytest
import ray
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker

from recipe.partial_rollout.worker.agent_loop_worker import (
    ObservedAgentLoopWorker,
    PartialRolloutAgentLoopWorker,
    RewardError,
)
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.rewards import Places, RewardWorkers, RewardWorkersLostError, reward_places


async def raises(*_):
    raise ZeroDivisionError("no such score")


async def hangs(*_):
    await asyncio.sleep(60)


def build_worker(kind, places=None, reward_s=0.05):
    worker = kind.__new__(kind)
    worker.config = SimpleNamespace(partial_rollout=SimpleNamespace(deadlines=SimpleNamespace(reward_s=reward_s)))
    worker._rewards = Places(places)
    return worker


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "reward function failed on prompt 0/7: ZeroDivisionError: no such score"),
        (hangs, r"no score for prompt 0/7 within 0\.05 s \(partial_rollout\.deadlines\.reward_s\)"),
    ],
)
def test_reward_function_that_fails_or_hangs_is_named(monkeypatch, function, message):
    monkeypatch.setattr(AgentLoopWorker, "_compute_score", function)
    with pytest.raises(RewardError, match=message):
        asyncio.run(build_worker(ObservedAgentLoopWorker)._compute_score([], {"uid": "0/7"}))


def ended():
    return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=2, metrics=AgentLoopMetrics())


@pytest.mark.parametrize("kind", [ObservedAgentLoopWorker, PartialRolloutAgentLoopWorker])
async def test_reward_call_that_queues_for_a_place_has_no_clock_running(monkeypatch, kind):
    """Twelve calls of 0.1 s on two places take 0.6 s in all; each has 0.5 s, and its sample as many between calls."""
    running = most = 0

    async def counts(self, outputs, kwargs):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        outputs[-1].metrics.compute_score = 0.1

    monkeypatch.setattr(AgentLoopWorker, "_compute_score", counts)
    worker = build_worker(kind, places=2, reward_s=0.5)

    async def score(i):
        sample = LiveSample(f"0/{i}#0", keeper=None, priority=0, deadline_s=0.5)
        LIVE_SAMPLE.set(sample)
        await sample.clock.run(worker._compute_score([ended()], {"uid": sample.id}))

    await asyncio.gather(*[score(i) for i in range(12)])
    assert most == 2


@pytest.mark.parametrize(
    ("given", "service", "workers", "nodes", "places"),
    [
        (7, False, 2, [64], 7),
        (None, True, 2, [64], None),
        (None, False, 2, [64], 4),
        (None, False, 16, [64], 1),
        (None, False, 4, [4, 64, 0], 3),
    ],
    ids=["as set", "a service queues by itself", "shared by the workers", "at least one", "cores of all nodes"],
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


class Worker:
    """Actor handle of a reward worker; ``error`` is raised by each call."""

    def __init__(self, error=None):
        self.error, self.calls, self.compute_score = error, 0, SimpleNamespace(remote=self._score)

    async def _score(self, data):
        self.calls += 1
        if self.error is not None:
            raise self.error
        return {"reward_score": data}


def scores(workers, count):
    async def ask():
        return [(await workers.compute_score.remote(i))["reward_score"] for i in range(count)]

    return asyncio.run(ask())


def test_dead_reward_workers_calls_go_to_the_living_ones_and_it_is_not_asked_again(monkeypatch):
    def init(self, config, handles):
        self.config, self.reward_loop_worker_handles = config, handles

    monkeypatch.setattr(AgentLoopWorker, "__init__", init)
    config = SimpleNamespace(partial_rollout=SimpleNamespace(reward_in_worker=False, reward_concurrency=1))
    dead, living = Worker(ActorDiedError()), Worker()
    (workers,) = ObservedAgentLoopWorker(config, [dead, living]).reward_loop_worker_handles
    assert scores(workers, 50) == list(range(50))
    assert dead.calls == 1 and living.calls == 50
    living.error = ActorDiedError()
    for _ in range(2):
        with pytest.raises(RewardWorkersLostError, match=r"no reward worker answers \(reward\.num_workers\): "):
            scores(workers, 1)


def test_reward_worker_that_ray_cannot_reach_is_asked_again_later():
    away, living = Worker(ActorUnavailableError("no route", b"1" * 16)), Worker()
    workers = RewardWorkers([away, living])
    assert scores(workers, 50) == list(range(50)) and living.calls == 50
    away.error = None
    assert scores(workers, 50) == list(range(50)) and living.calls < 100


def test_reward_functions_own_error_about_an_actor_is_not_taken_for_its_workers_death():
    error = RayTaskError("compute_score", "traceback", ActorDiedError()).as_instanceof_cause()
    assert isinstance(error, ActorDiedError)
    failing = [Worker(error), Worker(error)]
    with pytest.raises(RayTaskError):
        scores(RewardWorkers(failing), 1)
    assert sum(worker.calls for worker in failing) == 1


async def test_call_that_is_given_up_ends_in_its_reward_worker(monkeypatch):
    """Ray lets it go on there, and another call has its place here."""
    cancelled = []
    worker, call = Worker(), asyncio.Future()
    worker.compute_score = SimpleNamespace(remote=lambda data: call)
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    asking = asyncio.create_task(RewardWorkers([worker]).remote(7))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert ([each is call for each in cancelled], asking.cancelled()) == ([True], True)
