"""The worker's reward calls: one that fails or hangs is named, and the moments of the others are noted."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker

from recipe.partial_rollout.worker.agent_loop_worker import PartialRolloutAgentLoopWorker
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.observed_worker import ObservedAgentLoopWorker, RewardError


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
    with pytest.raises(RewardError, match=message):
        asyncio.run(worker._compute_score([], {"uid": "0/7"}))


async def scores(self, outputs, kwargs):
    await asyncio.sleep(0.02)
    outputs[-1].reward_score, outputs[-1].metrics.compute_score = 1.0, 0.02


async def has_a_score(self, outputs, kwargs):
    """As verl's, for an agent loop that scores itself: there is no reward call."""


def ended():
    return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=2, metrics=AgentLoopMetrics())


def build_worker(kind):
    worker = kind.__new__(kind)
    worker.config = SimpleNamespace(partial_rollout=SimpleNamespace(deadlines=SimpleNamespace(reward_s=5.0)))
    worker._scorings = []
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
