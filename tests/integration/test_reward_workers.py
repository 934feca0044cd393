"""verl's reward workers with a function that never returns, as a regular expression may, or that ends its process."""

import asyncio

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.experimental.reward_loop import RewardLoopManager
from verl.protocol import DataProto

from recipe.partial_rollout.waits import InfraError
from recipe.partial_rollout.worker.rewards import RewardWorkers
from tests.unit.conftest import build_config
from tests.unit.shared import byte_tokenizer

REWARD = """
import ctypes
import os


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "degenerate":
        ctypes.PyDLL(None).sleep(3600)
    if ground_truth == "fatal":
        os._exit(1)
    return 1.0
"""


def call_for(truth):
    ones = torch.ones(1, 4, dtype=torch.int64)
    fields = {"data_source": "t", "reward_model": {"ground_truth": truth}, "raw_prompt": []}
    columns = {key: np.empty(1, dtype=object) for key in fields}
    for key, value in fields.items():
        columns[key][0] = value
    return DataProto(TensorDict({"responses": ones * 65, "attention_mask": ones, "prompts": ones[:, :0]}, 1), columns)


@pytest.fixture
def reward_workers(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    byte_tokenizer("", pad_token="<pad>", eos_token="<eos>").save_pretrained(tmp_path)
    config = build_config(
        "quickstart_cpu",
        f"actor_rollout_ref.model.path={tmp_path}",
        f"actor_rollout_ref.model.tokenizer_path={tmp_path}",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        "partial_rollout.failures.worker_restarts=3",
    )
    return RewardWorkers(RewardLoopManager(config).reward_loop_worker_handles, config)


def test_reward_worker_that_dies_or_hangs_restarts_within_its_bound(reward_workers):
    async def score():
        with pytest.raises(RuntimeError, match="two reward workers died in turn"):
            await asyncio.wait_for(reward_workers.remote(call_for("fatal")), 300)
        # It has ended its worker twice, and the worker starts again.
        assert (await asyncio.wait_for(reward_workers.remote(call_for("good")), 300))["reward_score"] == 1.0
        stuck = asyncio.create_task(reward_workers.remote(call_for("degenerate")))
        await asyncio.sleep(1.0)
        behind = asyncio.create_task(reward_workers.remote(call_for("good")))
        await asyncio.sleep(1.0)
        assert not behind.done()
        stuck.cancel()
        assert (await asyncio.wait_for(behind, 300))["reward_score"] == 1.0
        stuck = asyncio.create_task(reward_workers.remote(call_for("degenerate")))
        await asyncio.sleep(1.0)
        stuck.cancel()
        await asyncio.wait([stuck])
        with pytest.raises(InfraError, match=r"reward\.py.*worker_restarts=3"):
            await asyncio.wait_for(reward_workers.remote(call_for("good")), 120)

    asyncio.run(score())
