"""Every algorithm of ``conf/algorithm`` composes, passes verl's checks and the recipe's, and is what its paper says."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config import PartialRolloutConfig
from recipe.partial_rollout.correction_check import check_correction

# name: (estimator, policy loss under partial rollout, behaviour weights, lower clip, upper clip, aggregation)
ALGORITHMS = {
    "grpo": ("grpo", "decoupled_ppo", "token", 0.2, 0.2, "token-mean"),
    "grpo_passk": ("grpo_passk", "decoupled_ppo", "token", 0.2, 0.2, "token-mean"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "decoupled_ppo", "token", 0.2, 0.2, "token-mean"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "decoupled_ppo", "token", 0.2, 0.2, "token-mean"),
    "rloo": ("rloo", "decoupled_ppo", "token", 0.2, 0.2, "token-mean"),
    "opo": ("opo", "decoupled_ppo", "token", 0.2, 0.2, "token-mean"),
    "gpg": ("gpg", "gpg", "token", 0.2, 0.2, "token-mean"),
    "gspo": ("grpo", "gspo", "sequence", 3e-4, 4e-4, "seq-mean-token-mean"),
    "sapo": ("grpo", "sapo", "token", 0.2, 0.2, "seq-mean-token-mean"),
}


def build(name, *overrides):
    with initialize_config_dir(str(main_ppo.CONF_DIR), version_base=None):
        config = compose(name, overrides=list(overrides))
    OmegaConf.resolve(config)
    return config


def test_there_is_a_test_for_each_file():
    assert {path.stem for path in (main_ppo.CONF_DIR / "algorithm").glob("*.yaml")} == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_trains_corrected_under_partial_rollout(name, capsys):
    config = build("quickstart_cpu", f"algorithm={name}")
    check_correction(config, PartialRolloutConfig.from_config(config))
    main_ppo.wire(config)
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert (
        config.algorithm.adv_estimator,
        actor.policy_loss.loss_mode,
        correction.rollout_is,
        actor.clip_ratio_low,
        actor.clip_ratio_high,
        actor.loss_agg_mode,
    ) == ALGORITHMS[name]
    assert get_adv_estimator_fn(config.algorithm.adv_estimator) and get_policy_loss_fn(actor.policy_loss.loss_mode)
    assert omega_conf_to_dataclass(config.algorithm).adv_estimator == config.algorithm.adv_estimator
    assert not need_critic(config) and not need_reference_policy(config)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_is_verls_own_without_partial_rollout(name):
    config = build("quickstart_cpu", f"algorithm={name}", "partial_rollout.enable=False")
    main_ppo.wire(config)
    assert config.algorithm.rollout_correction.rollout_is is None
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode in ("vanilla", "gpg", "gspo", "sapo")


@pytest.mark.parametrize(
    "config_name", [path.stem for path in main_ppo.CONF_DIR.glob("*.yaml") if "hydra:" in path.read_text()]
)
def test_plain_run_is_grpo(config_name):
    assert build(config_name) == build(config_name, "algorithm=grpo", "engine=fsdp2")


def test_single_key_still_overrides_the_named_algorithm():
    config = build("quickstart_cpu", "algorithm=gspo", "algorithm.adv_estimator=rloo")
    assert config.algorithm.adv_estimator == "rloo"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"


def test_conf_dir_is_the_one_of_this_checkout():
    assert Path(__file__).resolve().parents[2] / "conf" == main_ppo.CONF_DIR
