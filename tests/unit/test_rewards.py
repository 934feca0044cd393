"""The worker's reward calls: so many at once, one that fails or hangs is named, and a dead reward worker costs no score."""

import asyncio
import contextlib
import inspect
import itertools
import os
import threading
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.remote import RemoteRewardManager
from verl.protocol import DataProto

from recipe.partial_rollout.waits import InfraError
from recipe.partial_rollout.worker import rewards
from recipe.partial_rollout.worker.observed import ObservedAgentLoopWorker
from recipe.partial_rollout.worker.rewards import RewardError, check_limited, checked, reward_of, reward_permits
from tests.unit.conftest import build_config

CONFIG = (
    "partial_rollout.reward_in_worker=False",
    "partial_rollout.reward_concurrency=64",
    "partial_rollout.deadlines.reward_s=0.05",
    "partial_rollout.failures.sample_retries=null",
    "reward.custom_reward_function.path=my_reward.py",
)


def worker_of(monkeypatch, *overrides, handles=None):
    """The agent-loop worker, without verl's own set-up."""

    def init(self, config):
        self.config, self.reward_loop_worker_handles = config, handles
        text = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=9))
        self.model_config = SimpleNamespace(hf_config=text)

    monkeypatch.setattr(AgentLoopWorker, "__init__", init)
    return ObservedAgentLoopWorker(build_config("quickstart_cpu", *CONFIG, *overrides))


def score_of(worker, uid="0/7"):
    output = SimpleNamespace(prompt_ids=[1], response_ids=[1], reward_score=None, extra_fields={})
    return worker._score([output], {"uid": uid})


@pytest.mark.parametrize("manager", ["naive", "rate_limited"])
async def test_reward_that_hangs_is_named_unless_verls_manager_has_its_deadline(monkeypatch, manager):
    """The rate_limited manager queues calls itself."""
    scored = []

    async def slow(self, outputs, kwargs):
        await asyncio.sleep(0.2)
        scored.append(kwargs["uid"])

    monkeypatch.setattr(AgentLoopWorker, "_compute_score", slow)
    message = r"no score for prompt 0/7 within 0\.05 s \(partial_rollout\.deadlines\.reward_s\)"
    late = pytest.raises(RewardError, match=message) if manager == "naive" else contextlib.nullcontext()
    with late:
        await score_of(worker_of(monkeypatch, f"reward.reward_manager.name={manager}"))
    assert scored == ["0/7"] * (manager == "rate_limited")


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
    deadline = "partial_rollout.deadlines.reward_s=1.5"
    worker = worker_of(monkeypatch, "partial_rollout.reward_concurrency=2", deadline)
    await asyncio.gather(*[score_of(worker, str(i)) for i in range(12)])
    assert most == 2


def manager_of(name, function, **reward):
    """The reward manager of this class, or verl's of this name, around the user's ``function``."""
    kind = name if isinstance(name, type) else get_reward_manager_cls(name)
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


class Own(RewardManagerBase):
    """The user's. It does not say whether its function is a coroutine."""

    async def run_single(self, data):
        judge = self.compute_score
        return await asyncio.gather(judge() if inspect.iscoroutinefunction(judge) else asyncio.to_thread(judge))


@pytest.mark.parametrize("kind", ["naive", "dapo", Own])
@pytest.mark.parametrize("synchronous", [True, False])
async def test_reward_worker_is_stuck_while_a_thread_outlives_its_call(kind, synchronous):
    release = threading.Event()
    manager = manager_of(kind, (lambda **_: release.wait(20)) if synchronous else late)
    worker = SimpleNamespace(reward_manager=manager)
    in_time, too_late = [asyncio.ensure_future(manager.run_single(one_row())) for _ in range(2)]
    try:
        await asyncio.sleep(0.05)
        assert not rewards._goes_on(worker)
        too_late.cancel()
        await asyncio.wait([too_late])
        assert rewards._goes_on(worker) == synchronous
    finally:
        release.set()
        in_time.cancel()
    await asyncio.sleep(0.05)
    assert not rewards._goes_on(worker)
    worker.reward_manager = object.__new__(RemoteRewardManager)
    assert rewards._goes_on(worker), "its function runs in an actor"


def raises(error):
    def judge(**_):
        raise error

    return judge


def raises_later(error):
    async def judge(**_):
        raise error

    return judge


@pytest.mark.parametrize("error", [StopIteration("empty"), SystemExit("empty"), KeyboardInterrupt("empty")])
@pytest.mark.parametrize("kind", [raises, raises_later])
async def test_judge_that_stops_or_exits_fails_its_call(error, kind):
    """An event loop ends by the last two, and never hears that a thread raised the first."""
    with pytest.raises(RewardError, match=f"failed on prompt 0/7: RuntimeError: .*{type(error).__name__}"):
        await reward_of(manager_of("naive", kind(error)).run_single(one_row()), "0/7", 5.0)


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
async def test_error_that_verls_manager_scores_zero_is_a_failed_reward(judge, said):
    found = await manager_of("rate_limited", judge, timeout=0.05).run_single(one_row())
    assert found["reward_score"] == 0.0
    with pytest.raises(RewardError, match=f"reward function {said}"):
        check_limited("0/7", found["reward_extra_info"])


@pytest.mark.parametrize("name", ["naive", "rate_limited"])
async def test_score_beside_words_of_an_error_is_a_score(name):
    """A judge of programs may say that the model's program failed, or was late."""
    for said in ({"error": "SyntaxError"}, {"timeout": True}, {"acc": 0.0, "error": "", "timeout": True}):
        found = await manager_of(name, lambda said=said, **_: {"score": 0.0, **said}).run_single(one_row())
        check_limited("0/7", found["reward_extra_info"])
        assert checked(found["reward_score"], "0/7", found["reward_extra_info"]) == 0.0


@pytest.mark.parametrize("own_score", [True, False], ids=["the loop's", "a manager's"])
@pytest.mark.parametrize("limits", [["name=rate_limited"], ["name=rate_limited", "source=importlib"]])
async def test_words_of_verls_manager_are_a_failure_in_its_answers_alone(monkeypatch, own_score, limits):
    info = {"acc": 1.0, "error": None}

    async def answers(self, outputs, kwargs):
        outputs[-1].reward_score, outputs[-1].extra_fields["reward_extra_info"] = 1.0, info

    monkeypatch.setattr(AgentLoopWorker, "_compute_score", answers)
    worker = worker_of(monkeypatch, *[f"reward.reward_manager.{limit}" for limit in limits])
    output = SimpleNamespace(reward_score=1.0 if own_score else None, extra_fields={"reward_extra_info": info})
    is_verls = len(limits) == 1 and not own_score
    with pytest.raises(RewardError) if is_verls else contextlib.nullcontext():
        await worker._score([output], {"uid": "0/7"})


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
    config = build_config(
        "quickstart_cpu",
        f"partial_rollout.reward_concurrency={'null' if given is None else given}",
        f"reward.reward_model.enable={service}",
        f"actor_rollout_ref.rollout.agent.num_workers={workers}",
    )
    assert reward_permits(config) == places


# -- reward workers: ``tests/integration/test_reward_workers.py`` has Ray's own, that die and that hang ------------------

DIED, AWAY = ActorDiedError(), ActorUnavailableError("no route", b"1" * 16)


def reward_worker(*errors, away=()):
    """Actor handle of a reward worker, whose first calls raise ``errors``; it is ``away`` as often before it answers."""
    answers = itertools.chain(errors, ({"reward_score": 1.0} for _ in itertools.count()))
    ready = itertools.chain(away, itertools.repeat(True))
    return SimpleNamespace(
        compute_score=SimpleNamespace(remote=AsyncMock(side_effect=answers)),
        __ray_ready__=SimpleNamespace(remote=AsyncMock(side_effect=ready)),
    )


def workers_of(monkeypatch, *handles, overrides=()):
    """What verl calls in place of ``handles``."""
    monkeypatch.setattr(rewards, "AGAIN_S", 0.001)
    (workers,) = worker_of(monkeypatch, *overrides, handles=list(handles)).reward_loop_worker_handles
    return workers


async def score(workers, count=1):
    for _ in range(count):
        assert await workers.compute_score.remote("data") == {"reward_score": 1.0}


def calls(worker):
    return worker.compute_score.remote.await_count


async def test_reward_calls_go_to_the_workers_that_live_until_there_is_none(monkeypatch):
    dead, living = reward_worker(away=[DIED] * 9), reward_worker()
    workers = workers_of(monkeypatch, dead, living)
    await score(workers, 50)
    assert (calls(dead), calls(living)) == (0, 50) and dead.__ray_ready__.remote.await_count == 1
    living.__ray_ready__.remote.side_effect = DIED
    with pytest.raises(InfraError, match=r"reward\.num_workers is left: my_reward\.py .*worker_restarts=3 allows"):
        await score(workers)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], r"my_reward\.py cannot be loaded"),
        (["module.path=own.py"], r"my_reward\.py cannot be loaded"),
        (["module.path=own.py", "source=importlib"], r"my_reward\.py or own\.py cannot be loaded"),
    ],
)
async def test_dead_reward_workers_are_told_with_the_files_that_they_load(monkeypatch, overrides, said):
    given = [f"reward.reward_manager.{each}" for each in overrides]
    with pytest.raises(InfraError, match=said):
        await score(workers_of(monkeypatch, reward_worker(away=[DIED]), overrides=given))


async def test_call_whose_reward_worker_dies_is_made_once_more(monkeypatch):
    once, twice = reward_worker(AWAY, away=[AWAY] * 3), reward_worker(AWAY, AWAY)
    await score(workers_of(monkeypatch, once))
    with pytest.raises(RuntimeError, match="two reward workers died in turn during one call"):
        await score(workers_of(monkeypatch, twice))
    assert calls(once) == calls(twice) == 2


async def test_error_about_an_actor_of_the_functions_is_no_death_of_its_worker(monkeypatch):
    failing = reward_worker(RayTaskError("compute_score", "traceback", ActorDiedError()).as_instanceof_cause())
    with pytest.raises(RayTaskError):
        await score(workers_of(monkeypatch, failing))
    assert calls(failing) == 1
