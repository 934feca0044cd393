"""Where a step's proximal log-probs come from, and which figures of a step without the pass are left out."""

import pytest
import torch
from verl.protocol import DataProto

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.loss import WeightLevel, weight_level
from recipe.partial_rollout.training.proximal import ProximalPolicy, effective_sample_size, needs_pass
from verl_ext.reported_entropy import ASKED

CORRECTION = type("Correction", (), {"rollout_is": "token", "rollout_is_threshold": 2.0})


def build(*, from_update=True):
    return ProximalPolicy(from_update=from_update, rollout_correction=CORRECTION, most_rows=8)


def build_batch(rows=1):
    return DataProto.from_single_dict({"rollout_log_probs": torch.tensor([[-1.0, -2.0]] * rows)})


@pytest.fixture
def composed(composed_config):
    def build(*overrides):
        config = composed_config("quickstart_cpu", *overrides)
        return config, PartialRolloutConfig.from_config(config)

    return build


def test_quick_start_trains_a_batch_in_one_update_and_leaves_the_pass_out(composed):
    config, settings = composed()
    assert not needs_pass(config)
    proximal = ProximalPolicy.of(config, settings)
    assert [step for step in range(1, 30) if proximal.recomputes(step)] == [1, 11, 21]


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_is_batch_normalize=True",
        "algorithm.use_kl_in_reward=True",
        "algorithm.adv_estimator=tir_optimal_token_baseline",
        "actor_rollout_ref.model.lora.dropout=0.1",
    ],
)
def test_pass_is_run_where_something_needs_it(composed, override):
    config, settings = composed(override)
    assert needs_pass(config)
    assert ProximalPolicy.of(config, settings).recomputes(2)


@pytest.mark.parametrize("override", ["partial_rollout.enable=False", "partial_rollout.proximal=recompute"])
def test_pass_is_run_under_nopr_and_where_it_is_asked_for(composed, override):
    assert ProximalPolicy.of(*composed(override)).recomputes(2)


def test_recomputing_tells_the_loss_nothing():
    proximal, batch = build(from_update=False), build_batch()
    proximal.instruct(batch, 3)
    assert proximal.recomputes(1) and proximal.recomputes(2)
    assert not batch.meta_info


@pytest.mark.parametrize(("step", "checks"), [(11, True), (12, False)])
def test_loss_learns_how_to_weigh_and_gives_the_entropy_where_no_pass_does(step, checks):
    batch = build_batch()
    build().instruct(batch, step)
    assert batch.meta_info == {
        loss.PROXIMAL_FROM_UPDATE: True,
        loss.PROXIMAL_CHECK: checks,
        ASKED: not checks,
        loss.WEIGHT_LEVEL: "token",
        loss.WEIGHT_THRESHOLD: 2.0,
    }


def test_batch_of_two_updates_ends_the_run():
    with pytest.raises(RuntimeError, match=r"batch of 9 responses .* = 8\): set partial_rollout.proximal=recompute"):
        build().instruct(build_batch(9), 1)
    build(from_update=False).instruct(build_batch(9), 1)


def test_stand_in_has_the_behaviour_log_probs_and_is_no_view_of_them():
    batch = build_batch()
    stand_in = build().stand_in(batch)
    assert torch.equal(stand_in.batch["old_log_probs"], batch.batch["rollout_log_probs"])
    stand_in.batch["old_log_probs"].zero_()
    assert batch.batch["rollout_log_probs"][0, 0] == -1.0


def test_figures_of_the_stand_in_are_left_out_and_the_losses_own_renamed():
    logged = {
        "actor/entropy": 0.0,
        "perf/mfu/actor_infer": 0.0,
        "rollout_corr/kl": 0.0,
        "training/rollout_probs_diff_max": 0.0,
        "training/global_step": 1,
        "actor/partial_rollout/proximal/error": 0.01,
        "actor/partial_rollout/entropy": 0.7,
    }
    kept = build().metrics(logged, 2)
    assert kept == {"training/global_step": 1, "actor/entropy": 0.7, "partial_rollout/proximal/error": 0.01}
    assert "rollout_corr/kl" in build().metrics(logged, 11)
    assert "actor/entropy" in build(from_update=False).metrics(logged, 1)


def test_effective_sample_size_and_gap_are_made_of_what_the_loss_sums():
    sums = {"behaviour_weight/mean": 0.5, "behaviour_weight/square": 1.0, "kv_gap": 0.01, "kv_gap_share": 0.25}
    assert build().metrics({f"actor/partial_rollout/{key}": value for key, value in sums.items()}, 2) == {
        "partial_rollout/behaviour_weight/mean": 0.5,
        "partial_rollout/behaviour_weight/ess": 0.25,
        "partial_rollout/mismatch/kv_gap_mean": 0.04,
    }


def test_figures_of_the_weights_are_verls_where_verl_makes_them():
    logged = {"rollout_corr/rollout_is_mean": 0.9, "rollout_corr/rollout_is_eff_sample_size": 0.8}
    made = build(from_update=False).metrics(logged, 1)
    assert made == logged | {"partial_rollout/behaviour_weight/mean": 0.9, "partial_rollout/behaviour_weight/ess": 0.8}
    assert build().metrics(logged, 1) == logged


def test_effective_sample_size_is_none_of_no_weights_and_never_exceeds_one():
    assert effective_sample_size(0.0, 0.0) == 0.0
    # Equal weights, whose means were rounded apart: seen in a training.
    assert effective_sample_size(1.000000000000128, 1.000000000000128) == 1.0


def test_divergence_is_the_losses_where_verl_cannot_know_it():
    logged = {"rollout_corr/k3_kl": 0.0, "actor/partial_rollout/k3_kl": 0.002, "actor/partial_rollout/kl": -0.001}
    assert build().metrics(logged, 2) == {"rollout_corr/k3_kl": 0.002, "rollout_corr/kl": -0.001}
    assert build().metrics(logged, 11) == {"rollout_corr/k3_kl": 0.0, "rollout_corr/kl": -0.001}


def test_losses_with_one_ratio_a_sequence_get_one_weight_a_sequence():
    assert weight_level("gspo") is weight_level("geo_mean") is WeightLevel.GEOMETRIC
    assert weight_level("vanilla") is weight_level("sapo") is weight_level("gpg") is WeightLevel.TOKEN
