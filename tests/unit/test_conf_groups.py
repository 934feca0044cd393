"""Groups of ``conf``: ``engine=`` changes every part of the trainer, every algorithm passes all checks."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.utils import need_critic, need_reference_policy

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.settings import FilterSettings, PartialRolloutConfig
from recipe.partial_rollout.preflight import check_settings


@pytest.mark.parametrize(("engine", "overrides"), [("fsdp2", ()), ("megatron", ("engine=megatron",))])
def test_engine_is_fsdp2_by_default_and_one_override_changes_every_part(resolved_config, engine, overrides):
    """verl's workers build their parts of it in ``e2e/test_megatron.py``."""
    config = resolved_config("quickstart_cpu", *overrides)
    parts = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic
    assert [part.strategy for part in parts] == [engine] * 3


# -- algorithm= --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in (main_ppo.CONF_DIR / "algorithm").glob("*.yaml")))
def test_algorithm_is_corrected_under_pr_and_verls_own_without(resolved_config, name):
    ours, baseline = (
        resolved_config("quickstart_cpu", f"algorithm={name}", f"partial_rollout.enable={arm}") for arm in (True, False)
    )
    check_settings(ours)
    for config in (ours, baseline):
        main_ppo.apply_overrides(config)
        own = name if name in ("gpg", "gspo", "sapo") else "vanilla"
        assert config.actor_rollout_ref.actor.policy_loss.loss_mode == own
    assert baseline.algorithm.rollout_correction.rollout_is is None
    assert PartialRolloutConfig.from_config(baseline).group_filter is None
    assert ours.algorithm.rollout_correction.rollout_is == ("geometric" if name == "gspo" else "token")
    assert not need_critic(ours) and not need_reference_policy(ours)


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
