"""noPR's rounds are noted whatever columns the user's dataset has."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.protocol import DataProto

from recipe.partial_rollout.config.settings import FailureLimits
from recipe.partial_rollout.training.agent_loop_manager import ObservedAgentLoopManager
from recipe.partial_rollout.worker.rewards import REWARD_INFO


@pytest.mark.parametrize(
    "columns", [{"raw_prompt": ["a"], "index": 1}, {"raw_prompt": ["a"]}, {"index": 1}, {"mine": 1}]
)
async def test_round_of_a_dataset_without_verls_columns_is_noted(monkeypatch, columns):
    named = {key: np.array([value, None], dtype=object)[[0, 0]] for key, value in columns.items()}
    named[REWARD_INFO] = np.array([{}, {}])
    tensors = {key: torch.ones(2, 4, dtype=torch.long) for key in ("attention_mask", "prompts", "response_mask")}
    batch = DataProto.from_dict(tensors, non_tensors=named, meta_info={"global_steps": 1})

    async def nothing(*_):
        return {}

    async def generate(self, prompts):
        return batch

    monkeypatch.setattr(AgentLoopManager, "generate_sequences", generate)
    manager, rounds = object.__new__(ObservedAgentLoopManager), []
    settings = SimpleNamespace(batch_groups=2, samples_per_group=1, failures=FailureLimits())
    manager.session = SimpleNamespace(
        settings=settings,
        steps=SimpleNamespace(per_epoch=1),
        log=SimpleNamespace(round=rounds.append),
        control=SimpleNamespace(load=nothing),
        slots=SimpleNamespace(reckon=lambda calls: None),
        full_concurrency=2,
        engine_metrics=nothing,
        device_metrics=lambda phase: {},
        figures={},
    )
    manager._take_calls = lambda: nothing()
    await manager.generate_sequences(batch)
    assert len(rounds) == 1 and len({group.prompt for group in rounds[0].trained}) == 1
