"""A reward function that fails or hangs is named, by the worker that asked it."""

import asyncio
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

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
