"""The worker's reward calls: so many at once, one that fails or hangs is named, and a dead reward worker costs no score."""

import asyncio
import contextlib
import itertools
import os
import threading
import traceback
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
import ray
import torch
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.protocol import DataProto

from recipe.partial_rollout.worker.observed import ObservedAgentLoopWorker
from recipe.partial_rollout.worker.rewards import (
    RewardError,
    RewardWorkers,
    RewardWorkersLostError,
    checked,
    paces_rewards,
    reward_of,
    reward_places,
)
from tests.unit.shared import hangs, live_sample


def build_worker(places=None, reward_s=0.05):
    made = object.__new__(ObservedAgentLoopWorker)
    made.config = SimpleNamespace(partial_rollout=SimpleNamespace(deadlines=SimpleNamespace(reward_s=reward_s)))
    made._rewards = contextlib.nullcontext() if places is None else asyncio.Semaphore(places)
    return made


async def test_reward_function_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr(AgentLoopWorker, "_compute_score", hangs)
    message = r"no score for prompt 0/7 within 0\.05 s \(partial_rollout\.deadlines\.reward_s\)"
    with pytest.raises(RewardError, match=message):
        await build_worker()._compute_score([], {"uid": "0/7"})


async def test_reward_call_that_queues_for_a_place_has_no_clock_running(monkeypatch):
    """Twelve calls of 0.3 s on two places take 1.8 s in all; each has 1.5 s."""
    running = most = 0

    async def counts(self, outputs, kwargs):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.3)
        running -= 1

    monkeypatch.setattr(AgentLoopWorker, "_compute_score", counts)
    scoring = build_worker(places=2, reward_s=1.5)

    async def score(i):
        sample = live_sample(id=f"0/{i}#0", deadline_s=1.5)
        with sample.clock.stopped():
            await scoring._compute_score([], {"uid": sample.id})

    await asyncio.gather(*[score(i) for i in range(12)])
    assert most == 2


def manager_of(name, function, **reward):
    """verl's reward manager of this name, around the user's ``function``."""
    kind = get_reward_manager_cls(name)
    # Its limits are the class's: those of the first one that is made.
    kind._class_initialized = False
    config = OmegaConf.create({"reward": {"max_concurrent": 64, **reward}, "trainer": {"experiment_name": "a"}})
    return kind(config, SimpleNamespace(decode=lambda ids, skip_special_tokens: "x"), function)


def one_row():
    tensors = {"responses": torch.ones(1, 4, dtype=torch.long), "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    rows = {"data_source": ["a"], "reward_model": [{"ground_truth": "1"}], "extra_info": [{}]}
    return DataProto(TensorDict(tensors, 1), {key: np.array(value, object) for key, value in rows.items()})


@pytest.mark.parametrize("name", ["naive", "dapo", "gdpo", "rate_limited"])
async def test_synchronous_judge_has_a_thread_for_every_call(name):
    """The default pool has four threads more than there are cores, and a deadline runs while a call queues for one."""
    together = threading.Barrier(60)

    def judge(**_):
        together.wait(20)
        return 1.0

    manager = manager_of(name, judge)
    scored = await asyncio.gather(*[reward_of(manager.run_single(one_row()), i, 30.0) for i in range(60)])
    assert [checked(each["reward_score"], "p", each["reward_extra_info"]) for each in scored] == [1.0] * 60


def raises(error):
    def judge(**_):
        raise error

    return judge


async def late(**_):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (raises(ConnectionError("the judge is away")), "failed on prompt 0/7: the judge is away"),
        (raises(ConnectionError()), "failed on prompt 0/7: "),
        (raises(TimeoutError("of its own")), r"gave no score for prompt 0/7 in time \(reward\.timeout\)"),
        (lambda **_: {"acc": 1.0}, "failed on prompt 0/7: 'score'"),
        (late, r"gave no score for prompt 0/7 in time \(reward\.timeout\)"),
    ],
)
async def test_error_that_verls_limiting_manager_turns_into_a_score_of_zero_is_a_failed_reward(judge, said):
    found = await manager_of("rate_limited", judge, timeout=0.05).run_single(one_row())
    assert found["reward_score"] == 0.0
    with pytest.raises(RewardError, match=f"reward function {said}"):
        checked(found["reward_score"], "0/7", found["reward_extra_info"])


@pytest.mark.parametrize("name", ["naive", "rate_limited"])
async def test_score_beside_words_of_an_error_is_a_score(name):
    """A judge of programs may say that the model's program failed, or was late."""
    for said in ({"error": "SyntaxError"}, {"timeout": True}, {"acc": 0.0, "error": "", "timeout": True}):
        found = await manager_of(name, lambda said=said, **_: {"score": 0.0, **said}).run_single(one_row())
        assert checked(found["reward_score"], "0/7", found["reward_extra_info"]) == 0.0
    assert checked(0.0, "0/7", {"acc": 0.0, "timeout": False}) == 0.0


async def test_reward_call_that_queues_in_verls_limiting_manager_has_the_managers_deadline(monkeypatch):
    for name, paces in (("rate_limited", True), ("naive", False)):
        assert paces_rewards(OmegaConf.create({"reward": {"reward_manager": {"name": name}}})) is paces
    scored = []

    async def compute_score(self, outputs, kwargs):
        await asyncio.sleep(0.2)
        scored.append(kwargs["uid"])

    monkeypatch.setattr(AgentLoopWorker, "_compute_score", compute_score)
    scoring = build_worker(reward_s=0.05)
    scoring._paces = True
    await scoring._compute_score([], {"uid": "0/7"})
    assert scored == ["0/7"]


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


CONFIG = OmegaConf.create(
    {
        "partial_rollout": {"failures": {"worker_restarts": 3}},
        "reward": {"custom_reward_function": {"path": "my_reward.py"}},
    }
)


def worker(*errors, away=()):
    """Actor handle of a reward worker, whose first calls raise ``errors``; it is ``away`` as often before it answers."""
    answers = itertools.chain(errors, ({"reward_score": 1.0} for _ in itertools.count()))
    ready = itertools.chain(away, itertools.repeat(True))
    return SimpleNamespace(
        compute_score=SimpleNamespace(remote=AsyncMock(side_effect=answers)),
        __ray_ready__=SimpleNamespace(remote=AsyncMock(side_effect=ready)),
    )


def calls(worker):
    return worker.compute_score.remote.await_count


async def score(workers, count):
    for _ in range(count):
        assert await workers.compute_score.remote("data") == {"reward_score": 1.0}


async def test_dead_reward_workers_calls_go_to_the_living_ones_and_it_is_not_asked_again(monkeypatch):
    def init(self, config, handles):
        self.config, self.reward_loop_worker_handles = config, handles

    monkeypatch.setattr(AgentLoopWorker, "__init__", init)
    settings = {"reward_in_worker": False, "reward_concurrency": 1, "failures": {"worker_restarts": 3}}
    config = OmegaConf.merge(CONFIG, {"partial_rollout": settings, "algorithm": {"adv_estimator": "grpo"}})
    dead, living = worker(*[ActorDiedError()] * 9), worker()
    (workers,) = ObservedAgentLoopWorker(config, [dead, living]).reward_loop_worker_handles
    await score(workers, 50)
    assert (calls(dead), calls(living)) == (1, 50)
    living.compute_score.remote.side_effect = ActorDiedError()
    with pytest.raises(
        RewardWorkersLostError, match=r"\(reward\.num_workers\): my_reward\.py .*worker_restarts=3 times"
    ):
        await score(workers, 1)


async def test_reward_file_that_does_not_load_is_named_in_each_sample_that_it_fails():
    trace = 'Traceback (most recent call last):\n  File "my_reward.py", line 3\nAttributeError: no compute_score'
    dead = ActorDiedError(RayTaskError("RewardLoopWorker.__init__", trace, AttributeError(), "ray::x", 1, "::1"))
    workers = RewardWorkers([worker(*[dead] * 9), worker(*[dead] * 9)], CONFIG)
    for _ in range(3):
        with pytest.raises(RewardWorkersLostError, match="AttributeError: no compute_score") as lost:
            await score(workers, 1)
        assert 'my_reward.py", line 3' in "".join(traceback.format_exception(lost.value))


async def test_reward_worker_that_ray_cannot_reach_is_asked_again_later():
    lost = ActorUnavailableError("no route", b"1" * 16)
    away = worker(lost, away=[lost] * 3)
    await score(RewardWorkers([away], CONFIG), 1)
    assert calls(away) == 2


async def test_reward_functions_own_error_about_an_actor_is_not_taken_for_its_workers_death():
    error = RayTaskError("compute_score", "traceback", ActorDiedError()).as_instanceof_cause()
    failing = [worker(error), worker(error)]
    with pytest.raises(RayTaskError):
        await score(RewardWorkers(failing, CONFIG), 1)
    assert sum(map(calls, failing)) == 1


@pytest.mark.parametrize(
    ("runs_in_threads", "ended"),
    [(True, True), (False, False), (None, True), (ActorDiedError(), False)],
    ids=["a thread that goes on", "a coroutine that has ended", "no answer", "dead"],
)
async def test_reward_worker_of_a_call_that_is_given_up_starts_anew_if_the_function_may_hold_it(
    monkeypatch, runs_in_threads, ended
):
    """Without the cancellation Ray lets the call go on there, and another call has its place here."""
    cancelled, killed, call = [], [], asyncio.Future()
    answers = {"side_effect": hangs} if runs_in_threads is None else {"side_effect": [runs_in_threads]}
    hung = SimpleNamespace(
        compute_score=SimpleNamespace(remote=lambda data: call),
        __ray_call__=SimpleNamespace(remote=AsyncMock(**answers)),
    )
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append((actor, no_restart)))
    monkeypatch.setattr("recipe.partial_rollout.worker.rewards._ANSWERS_WITHIN_S", 0.05)
    asking = asyncio.create_task(RewardWorkers([hung], CONFIG).remote("data"))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() and len(cancelled) == 1 and cancelled[0] is call
    await asyncio.sleep(0.2)
    assert killed == [(hung, False)] * ended
