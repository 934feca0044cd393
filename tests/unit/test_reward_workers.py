"""A reward worker that dies with its node costs no sample its score."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

from recipe.partial_rollout.worker.agent_loop_worker import ObservedAgentLoopWorker
from recipe.partial_rollout.worker.rewards import RewardWorkers, RewardWorkersLostError


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


def test_dead_reward_workers_calls_go_to_the_living_ones_and_it_is_not_asked_again():
    dead, living = Worker(ActorDiedError()), Worker()
    assert scores(RewardWorkers([dead, living]), 50) == list(range(50))
    assert dead.calls == 1 and living.calls == 50


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


def test_call_that_is_given_up_ends_in_its_reward_worker(monkeypatch):
    """Ray lets it go on there, and another call has its place here."""
    cancelled = []

    async def body():
        worker, call = Worker(), asyncio.Future()
        worker.compute_score = SimpleNamespace(remote=lambda data: call)
        monkeypatch.setattr(ray, "cancel", cancelled.append)
        asking = asyncio.create_task(RewardWorkers([worker]).remote(7))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        return [each is call for each in cancelled], asking.cancelled()

    assert asyncio.run(body()) == ([True], True)


def test_loss_of_all_reward_workers_is_said():
    workers = RewardWorkers([Worker(ActorDiedError()), Worker(ActorDiedError())])
    for _ in range(2):
        with pytest.raises(RewardWorkersLostError, match=r"no reward worker answers \(reward\.num_workers\): "):
            scores(workers, 1)


def test_agent_loop_worker_asks_verls_reward_workers_in_this_way(monkeypatch):
    def init(self, config, handles):
        self.config, self.reward_loop_worker_handles = config, handles

    monkeypatch.setattr(AgentLoopWorker, "__init__", init)
    config = SimpleNamespace(partial_rollout=SimpleNamespace(reward_in_worker=False, reward_concurrency=1))
    (workers,) = ObservedAgentLoopWorker(config, [Worker(ActorDiedError()), Worker()]).reward_loop_worker_handles
    assert scores(workers, 10) == list(range(10))
