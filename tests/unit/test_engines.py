"""``engine=`` switches the train engine: every dataclass that verl builds, and the workers that serve it."""

import json

import pytest
from omegaconf import OmegaConf, open_dict
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    McoreActorConfig,
    McoreCriticConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
)

from recipe.partial_rollout import main_ppo

# Qwen3-4B on one node of eight devices.
SHAPE = (
    "trainer.n_gpus_per_node=8",
    "data.train_batch_size=64",
    "data.max_prompt_length=2048",
    "data.max_response_length=16384",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480",
    "actor_rollout_ref.actor.use_kl_loss=True",
)
MEGATRON = (
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.param_offload=True",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The configuration of Qwen3-4B, without weights or tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    fields = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.fixture
def build(model, composed_config):
    def compose_config(*overrides):
        paths = (f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}")
        config = composed_config("ppo_partial_rollout", *SHAPE, *paths, *overrides)
        OmegaConf.resolve(config)
        main_ppo.wire(config)
        with open_dict(config):
            config.actor_rollout_ref.model.load_tokenizer = False
            config.critic.model.load_tokenizer = False
        return config

    return compose_config


def dataclasses_of(config):
    """What the workers build: actor, reference (renamed as the worker renames it), critic, rollout and model."""
    ref = config.actor_rollout_ref.ref
    with open_dict(ref):
        ref.ppo_mini_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size
        ref.ppo_micro_batch_size = ref.pop("log_prob_micro_batch_size", None)
        ref.ppo_micro_batch_size_per_gpu = ref.pop("log_prob_micro_batch_size_per_gpu", None)
        ref.use_dynamic_bsz = ref.pop("log_prob_use_dynamic_bsz", False)
        ref.ppo_max_token_len_per_gpu = ref.pop("log_prob_max_token_len_per_gpu", None)
    nodes = {
        "actor": config.actor_rollout_ref.actor,
        "ref": ref,
        "critic": config.critic,
        "rollout": config.actor_rollout_ref.rollout,
        "model": config.actor_rollout_ref.model,
        "algorithm": config.algorithm,
        "checkpoint_engine": config.actor_rollout_ref.rollout.checkpoint_engine,
    }
    return {name: omega_conf_to_dataclass(node) for name, node in nodes.items()}


def test_engine_is_fsdp2_by_default_and_megatron_is_one_override(build):
    default = dataclasses_of(build())
    assert isinstance(default["actor"], FSDPActorConfig)
    config = build("engine=megatron", *MEGATRON)
    validate_config(config, use_reference_policy=True, use_critic=True)
    built = dataclasses_of(config)
    assert isinstance(built["actor"], McoreActorConfig) and isinstance(built["ref"], McoreActorConfig)
    assert isinstance(built["critic"], McoreCriticConfig)
    for part in ("actor", "ref", "critic"):
        assert isinstance(default[part].engine, FSDPEngineConfig), part
        assert default[part].strategy == default[part].engine.strategy == "fsdp2"
        assert isinstance(built[part].engine, McoreEngineConfig) and built[part].strategy == "megatron", part
    assert isinstance(built["actor"].optim, McoreOptimizerConfig)
    assert built["actor"].engine.tensor_model_parallel_size == built["ref"].engine.tensor_model_parallel_size == 2
    assert built["actor"].engine.pipeline_model_parallel_size == 2 and built["actor"].engine.param_offload
    assert built["ref"].engine.forward_only and not built["actor"].engine.forward_only
    assert built["actor"].policy_loss.loss_mode == "decoupled_ppo"
    assert built["algorithm"].rollout_correction["rollout_is"] == "token"
