"""Where a step's proximal log-probs come from, and how the loss's figures are logged."""

from contextlib import nullcontext

import pytest
import torch
from transformers import DbrxConfig, GPT2Config, MixtralConfig, Qwen3Config
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.preflight.inputs import check_noise
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.loss import ProximalPolicy, needs_pass
from recipe.partial_rollout.training.trainer_run import PartialRolloutRayPPOTrainer


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("data.seed=1", False),
        ("actor_rollout_ref.actor.ppo_epochs=2", True),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=4", True),
        ("algorithm.rollout_correction.rollout_rs=token_k1", True),
        ("algorithm.rollout_correction.rollout_is_batch_normalize=True", True),
        ("algorithm.use_kl_in_reward=True", True),
        ("algorithm.adv_estimator=tir_optimal_token_baseline", True),
        ("engine=megatron actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.dropout=0.1", True),
        ("actor_rollout_ref.model.lora_rank=8", False),
        ("actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_adapter_path=/adapter", True),
        ("engine=megatron actor_rollout_ref.actor.megatron.router_replay.mode=disabled", False),
        ("engine=megatron actor_rollout_ref.actor.megatron.router_replay.mode=R2", True),
        ("partial_rollout.enable=False", None),
    ],
)
def test_pass_runs_in_every_tenth_step_unless_something_needs_it(composed_config, override, needed):
    config = composed_config("quickstart_cpu", *override.split())
    assert needs_pass(config) is bool(needed)
    proximal = ProximalPolicy.of(config, PartialRolloutConfig.from_config(config))
    runs = [step for step in range(1, 22) if proximal.recomputes(step)]
    assert runs == ([1, 11, 21] if needed is False else list(range(1, 22)))


NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Qwen3Config(), None),
        (Qwen3Config(attention_dropout=0.1), "attention_dropout"),
        (MixtralConfig(router_jitter_noise=0.1), "router_jitter_noise"),
        (DbrxConfig(ffn_config={"moe_jitter_eps": 0.1}), "ffn_config.moe_jitter_eps"),
        # It has a dropout of 0.1 for heads that are not trained.
        (GPT2Config(**NO_DROPOUT), None),
        (GPT2Config(**NO_DROPOUT | {"embd_pdrop": 0.1}), "embd_pdrop"),
    ],
)
def test_model_with_dropout_or_jitter_is_refused_where_the_update_gives_the_proximal_log_probs(
    composed_config, layout, name
):
    words = (
        rf"without noise \(its config has {name}=0.1, .* or set \+actor_rollout_ref.model.override_config.{name}=0.0"
    )
    with pytest.raises(ConfigError, match=words) if name else nullcontext():
        check_noise(composed_config("quickstart_cpu"), layout)
    check_noise(composed_config("quickstart_cpu", "actor_rollout_ref.actor.ppo_epochs=2"), layout)


@pytest.mark.parametrize(("step", "passes"), [(1, True), (2, False), (10, False), (11, True)])
def test_verl_bypasses_its_pass_where_the_update_gives_the_log_probs(monkeypatch, composed_config, step, passes):
    """``fit`` reads ``bypass_mode`` in each step, and then takes the engines' log-probs for its own."""
    monkeypatch.setattr(RayPPOTrainer, "_get_gen_batch", lambda self, batch: batch)
    config, trainer = composed_config("quickstart_cpu"), object.__new__(PartialRolloutRayPPOTrainer)
    vars(trainer).update(config=config, global_steps=step)
    correction = config.algorithm.rollout_correction
    for from_update in (True, False):
        trainer.proximal = ProximalPolicy(from_update, "token", 2.0)
        batch = trainer._get_gen_batch(DataProto.from_single_dict({"rollout_log_probs": torch.zeros(1, 2)}))
        assert correction.bypass_mode is not passes, "where the pass is needed nobody touches it"
        assert batch.meta_info == {loss.VERSION: step - 1}


def test_losses_figures_have_the_names_by_which_they_are_logged():
    verls = {"training/global_step": 1, "actor/pg_loss": 0.1}
    made = {"actor/entropy": 0.7, "rollout_corr/k3_kl": 0.002, "partial_rollout/trust_region/masked": 0.1}
    weights, gap = {loss.WEIGHT_MEAN: 0.5, loss.WEIGHT_SQUARE: 1.0}, {"kv_gap": 0.01, "kv_gap_share": 0.25}
    data = verls | {f"actor/logged/{key}": value for key, value in (made | weights | gap).items()}
    ours = {"rollout_corr/rollout_is_mean": 0.5, "rollout_corr/rollout_is_eff_sample_size": 0.25}
    assert loss.logged(data) == verls | made | ours | {"partial_rollout/mismatch/kv_gap_mean": 0.04}
    assert loss.logged(verls | {"actor/logged/kv_gap": 0.01, "actor/logged/kv_gap_share": 0.0}) == verls


def test_effective_sample_size_is_none_of_no_weights_and_never_exceeds_one():
    def share(mean, square):
        figures = {f"actor/logged/{loss.WEIGHT_MEAN}": mean, f"actor/logged/{loss.WEIGHT_SQUARE}": square}
        return loss.logged(figures)["rollout_corr/rollout_is_eff_sample_size"]

    assert share(0.0, 0.0) == 0.0
    # Equal weights, whose means were rounded apart: seen in a training.
    assert share(1.000000000000128, 1.000000000000128) == 1.0
