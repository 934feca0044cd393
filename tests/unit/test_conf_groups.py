"""Groups of ``conf``: ``engine=`` gives each dataclass that verl's workers build, every algorithm passes all checks."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import open_dict
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import McoreCriticConfig, McoreEngineConfig, McoreOptimizerConfig

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.settings import FilterSettings, PartialRolloutConfig
from recipe.partial_rollout.preflight import check_settings

SIZES = ("tensor_model_parallel_size=2", "pipeline_model_parallel_size=2", "param_offload=True")


@pytest.fixture
def built(tmp_path, resolved_config):
    """``built(*overrides)``: the dataclasses of actor, reference and critic."""
    fields = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    paths = (f"actor_rollout_ref.model.path={tmp_path}", f"critic.model.path={tmp_path}")

    def build(*overrides):
        config = resolved_config("quickstart_cpu", "trainer.n_gpus_per_node=4", *paths, *overrides)
        main_ppo.apply_overrides(config)
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


# -- algorithm= --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in (main_ppo.CONF_DIR / "algorithm").glob("*.yaml")))
def test_algorithm_is_corrected_under_pr_and_verls_own_without(resolved_config, name):
    own = {"gpg": "gpg", "gspo": "gspo", "sapo": "sapo"}.get(name)
    baseline = resolved_config("quickstart_cpu", f"algorithm={name}", "partial_rollout.enable=False")
    main_ppo.apply_overrides(baseline)
    assert baseline.algorithm.rollout_correction.rollout_is is None
    assert baseline.actor_rollout_ref.actor.policy_loss.loss_mode == (own or "vanilla")
    assert PartialRolloutConfig.from_config(baseline).group_filter is None
    config = resolved_config("quickstart_cpu", f"algorithm={name}")
    check_settings(config)
    main_ppo.apply_overrides(config)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == (own or "vanilla")
    assert config.algorithm.rollout_correction.rollout_is == ("geometric" if name == "gspo" else "token")
    assert not need_critic(config) and not need_reference_policy(config)


def scored(config, length):
    """What verl's reward manager of ``config`` answers for ``length`` response tokens, a wrong answer."""
    words = SimpleNamespace(decode=lambda ids, skip_special_tokens: "!")

    async def score():
        sizes = {"responses": length, "attention_mask": 2 + length}
        tensors = {key: torch.ones(1, size, dtype=torch.int64) for key, size in sizes.items()}
        truth = np.array([{"ground_truth": "3?4=_?2=_-8=0"}], dtype=object)
        data = DataProto.from_dict(tensors, {"data_source": np.array(["clock10"]), "reward_model": truth})
        return await load_reward_manager(config, words).run_single(data)

    return asyncio.run(score())


def test_dapo_penalises_the_last_fifth_and_filters_by_the_reward_before_it(resolved_config):
    config = resolved_config("quickstart_cpu", "algorithm=dapo", "data.max_response_length=100")
    main_ppo.apply_overrides(config)
    assert [scored(config, length)["reward_score"] for length in (80, 90, 100)] == [0.0, -0.5, -1.0]
    group_filter = PartialRolloutConfig.from_config(config).group_filter
    assert group_filter == FilterSettings("acc", max_num_gen_batches=10)
    info = scored(config, 90)["reward_extra_info"]
    assert info == {"acc": 0.0, "overlong_reward": -0.5, "overlong": True}
