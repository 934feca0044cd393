"""A tiny Qwen3-MoE trains in both arms: its experts take every weight sync, and engine and trainer agree."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
AGREE = 1e-4
"""nats; verl logs the difference of probabilities, which are about 1/64 here"""
SMALL = (
    "data.train_batch_size=4",
    "data.max_response_length=200",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=280",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    # enough that an engine with the weights of the step before would not agree
    "actor_rollout_ref.actor.optim.lr=3.0e-3",
    # a score that differs between answers of a model that knows nothing
    f"reward.custom_reward_function.path={HERE / 'parity_reward.py'}",
    "trainer.total_training_steps=2",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Four experts of a size that vLLM pads, two of them for a token."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from recipe.partial_rollout.tasks.clock10.model import build_config, build_model
    from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer

    dense = build_config().to_dict()
    shared = {key: dense[key] for key in dense.keys() - {"model_type", "architectures", "transformers_version"}}
    config = Qwen3MoeConfig(
        **shared, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
    )
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    made = Qwen3MoeForCausalLM(config).float()
    made.generation_config = build_model(0).generation_config
    made.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("arm", "ours"),
    [
        pytest.param("noPR", "partial_rollout.enable=False", marks=pytest.mark.nightly),
        ("PR", "partial_rollout.overlap=1"),
    ],
)
def test_engine_and_trainer_agree_before_and_after_a_sync(module_train, model, arm, ours):
    steps = module_train(*SMALL, f"actor_rollout_ref.model.path={model}", ours, name=arm).steps
    assert sorted(steps) == [1, 2] and all(step["actor/grad_norm"] > 0 for step in steps.values())
    # In PR's second step tokens of older weights differ for good.
    for step in (steps[1], steps[2])[: 1 + (arm == "noPR")]:
        assert step["training/rollout_probs_diff_max"] < AGREE / 64
    assert arm == "noPR" or steps[1]["rollout_corr/k3_kl"] < AGREE
