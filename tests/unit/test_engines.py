"""``engine=`` switches the train engine of actor, reference and critic: every dataclass that verl's workers build."""

import json

import pytest
from omegaconf import open_dict
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import McoreCriticConfig, McoreEngineConfig, McoreOptimizerConfig

from recipe.partial_rollout import main_ppo

SIZES = ("tensor_model_parallel_size=2", "pipeline_model_parallel_size=2", "param_offload=True")


@pytest.fixture
def built(tmp_path, resolved_config):
    """``built(*overrides)``: the dataclasses of the three."""
    fields = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    paths = (f"actor_rollout_ref.model.path={tmp_path}", f"critic.model.path={tmp_path}")

    def build(*overrides):
        config = resolved_config("quickstart_cpu", "trainer.n_gpus_per_node=4", *paths, *overrides)
        main_ppo.wire(config)
        validate_config(config, use_reference_policy=True, use_critic=True)
        actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
        with open_dict(config):
            config.critic.model.load_tokenizer = False
            # As verl's worker renames them.
            ref.ppo_mini_batch_size = actor.ppo_mini_batch_size
            for key in [key for key in ref if key.startswith("log_prob_")]:
                ref[key.replace("log_prob_", "" if "dynamic" in key else "ppo_")] = ref.pop(key)
        return [omega_conf_to_dataclass(node) for node in (actor, ref, config.critic)]

    return build


def test_engine_is_fsdp2_by_default_and_megatron_is_one_override(built):
    assert [(part.strategy, part.engine.strategy) for part in built()] == [("fsdp2", "fsdp2")] * 3
    actor, ref, critic = parts = built(
        "engine=megatron", *[f"actor_rollout_ref.actor.megatron.{size}" for size in SIZES]
    )
    assert all(isinstance(part.engine, McoreEngineConfig) and part.strategy == "megatron" for part in parts)
    assert isinstance(critic, McoreCriticConfig) and isinstance(actor.optim, McoreOptimizerConfig)
    assert actor.engine.tensor_model_parallel_size == ref.engine.tensor_model_parallel_size == 2
    assert actor.engine.pipeline_model_parallel_size == 2 and actor.engine.param_offload
    assert ref.engine.forward_only and not actor.engine.forward_only
