"""LoRA adapters train under partial rollout: the engine loads the base model, and the adapters with every weight sync."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)

REWARD = Path(__file__).with_name("parity_reward.py")


def test_engine_decodes_with_the_adapters_of_its_version(module_train):
    steps = module_train(
        "data.train_batch_size=4",
        "data.max_response_length=200",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_model_len=280",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        f"reward.custom_reward_function.path={REWARD}",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.model.target_modules=all-linear",
        "actor_rollout_ref.rollout.load_format=safetensors",
        # Adapters begin as zero. After this update an engine without them would not agree with the trainer.
        "actor_rollout_ref.actor.optim.lr=1.0e-2",
        # Nothing is carried, so that every token is of the version that trains it.
        "partial_rollout.overlap=0",
        "trainer.total_training_steps=2",
    ).steps
    assert sorted(steps) == [1, 2] and all(step["actor/grad_norm"] > 0 for step in steps.values())
    assert steps[2]["partial_rollout/staleness/max"] == 0
    assert all(abs(step["rollout_corr/k3_kl"]) < 1e-5 for step in steps.values())
