"""Trainings with a reward model, or a reward that misbehaves; ``test_training.py`` has an asynchronous function."""

import math
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

HERE = Path(__file__).parent
SHORT = (
    "data.train_batch_size=4",
    "data.max_response_length=200",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=280",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "partial_rollout.overlap=1.0",
    "partial_rollout.max_staleness=2",
    "partial_rollout.reward_in_worker=False",
    "trainer.total_training_steps=2",
)


def test_reward_that_is_nan_or_odd_costs_its_sample_alone(train):
    run = train(
        *SHORT,
        f"reward.custom_reward_function.path={HERE / 'odd_reward.py'}",
        "reward.custom_reward_function.name=compute_score",
        "partial_rollout.failures.sample_retries=1",
        "partial_rollout.failures.max_masked_fraction=1",
        "trainer.test_freq=1",
        "data.val_max_samples=16",
        # verl asserts that each batch of a validation has every key.
        "data.val_batch_size=4",
    )
    assert sorted(run.steps) == [1, 2] and run.run["complete"]
    for step in run.steps.values():
        assert math.isfinite(step["critic/score/mean"]) and math.isfinite(step["actor/pg_loss"])
        (validated,) = [value for name, value in step.items() if re.fullmatch("val-core/[^/]*/reward/mean@1", name)]
        assert 0.25 <= validated <= 1
    assert sum(step["partial_rollout/failures/validation_samples"] for step in run.steps.values()) > 0
    assert "which is no finite number" in (run.directory / "terminal.log").read_text()
    assert sum(step["partial_rollout/lost_samples"] for step in run.steps.values()) == 0
    assert run.steps[2]["partial_rollout/failures/masked_total"] > 0


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A tiny random sequence classifier with the task's tokenizer: a score for every conversation."""
    import torch
    from transformers import Qwen3ForSequenceClassification

    from recipe.partial_rollout.tasks.clock10.model import build_config
    from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer

    directory = tmp_path_factory.mktemp("reward_model")
    config = build_config()
    config.num_labels = 1
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(config).float().save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("pool", [True, False])
def test_reward_model_trains(train, reward_model, pool):
    """In a pool it scores while the round runs, colocated once the round is interrupted."""
    run = train(
        *SHORT,
        "reward.custom_reward_function.path=null",
        "reward.reward_model.enable=True",
        f"reward.reward_model.enable_resource_pool={pool}",
        "reward.reward_model.n_gpus_per_node=1",
        "reward.reward_model.nnodes=1",
        f"ray_kwargs.ray_init.num_gpus={1 + pool}",
        f"reward.reward_model.model_path={reward_model}",
        "reward.reward_model.rollout.name=vllm",
        "reward.reward_model.rollout.dtype=float32",
        "reward.reward_model.rollout.tensor_model_parallel_size=1",
        "reward.reward_model.rollout.free_cache_engine=False",
        "+reward.reward_model.rollout.enable_sleep_mode=False",
        "reward.reward_model.rollout.max_model_len=512",
        "reward.reward_model.rollout.max_num_seqs=32",
        "reward.reward_model.rollout.prompt_length=256",
        "reward.reward_model.rollout.response_length=256",
        "+reward.reward_model.rollout.engine_kwargs.vllm.distributed_executor_backend=uni",
    )
    assert sorted(run.steps) == [1, 2] and run.run["complete"]
    for step in run.steps.values():
        assert math.isfinite(step["critic/score/mean"]) and math.isfinite(step["actor/pg_loss"])
        assert step["partial_rollout/lost_samples"] == 0
        assert step["actor/grad_norm"] > 0
    # A classifier's score is a real number, not the task's 0 or 1.
    assert any(step["critic/score/mean"] % 1 for step in run.steps.values())
