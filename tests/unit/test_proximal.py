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
        ("actor_rollout_ref.model.lora.dropout=0.1", True),
        ("partial_rollout.enable=False", None),
        ("partial_rollout.proximal=recompute", None),
    ],
)
def test_pass_is_left_out_but_in_every_tenth_step_unless_something_needs_it_or_it_is_asked_for(
    composed_config, override, needed
):
    config = composed_config("quickstart_cpu", override)
    assert needs_pass(config) is bool(needed)
    proximal = ProximalPolicy.of(config, PartialRolloutConfig.from_config(config))
    runs = [step for step in range(1, 22) if proximal.recomputes(step)]
    assert runs == ([1, 11, 21] if needed is False else list(range(1, 22)))


def test_loss_learns_how_to_weigh_and_gives_the_entropy_where_no_pass_does():
    told = {loss.PROXIMAL_FROM_UPDATE: True, loss.WEIGHT_LEVEL: "token", loss.WEIGHT_THRESHOLD: 2.0}
    for step, checks in ((11, True), (12, False)):
        batch, recomputed = build_batch(), build_batch(9)
        build().instruct(batch, step)
        assert batch.meta_info == told | {loss.PROXIMAL_CHECK: checks, ASKED: not checks}
        build(from_update=False).instruct(recomputed, step)
        assert not recomputed.meta_info
    with pytest.raises(RuntimeError, match=r"batch of 9 responses .* = 8\): set partial_rollout.proximal=recompute"):
        build().instruct(build_batch(9), 1)


def test_stand_in_has_the_behaviour_log_probs_and_is_no_view_of_them():
    batch = build_batch()
    stand_in = build().stand_in(batch)
    assert torch.equal(stand_in.batch["old_log_probs"], batch.batch["rollout_log_probs"])
    stand_in.batch["old_log_probs"].zero_()
    assert batch.batch["rollout_log_probs"][0, 0] == -1.0


def test_figures_of_the_stand_in_give_way_to_the_losses_own():
    logged = dict.fromkeys(("actor/entropy", "perf/mfu/actor_infer", "rollout_corr/k3_kl"), 0.0)
    logged |= {"training/rollout_probs_diff_max": 0.0, "training/global_step": 1}
    made = {"proximal/error": 0.01, "entropy": 0.7, "k3_kl": 0.002, "kv_gap": 0.01, "kv_gap_share": 0.25}
    made |= {"behaviour_weight/mean": 0.5, "behaviour_weight/square": 1.0}
    data = logged | {f"actor/partial_rollout/{key}": value for key, value in made.items()}
    ours = {"proximal/error": 0.01, "behaviour_weight/mean": 0.5, "behaviour_weight/ess": 0.25}
    ours = {f"partial_rollout/{key}": value for key, value in (ours | {"mismatch/kv_gap_mean": 0.04}).items()}
    own = {"training/global_step": 1, "actor/entropy": 0.7, "rollout_corr/k3_kl": 0.002}
    assert build().metrics(data, 2) == own | ours
    assert build().metrics(data, 11) == logged | ours, "a step with the pass"


def test_figures_of_the_weights_are_verls_where_verl_makes_them():
    logged = {"rollout_corr/rollout_is_mean": 0.9, "rollout_corr/rollout_is_eff_sample_size": 0.8}
    made = build(from_update=False).metrics(logged, 1)
    assert made == logged | {"partial_rollout/behaviour_weight/mean": 0.9, "partial_rollout/behaviour_weight/ess": 0.8}
    assert build().metrics(logged, 1) == logged


def test_effective_sample_size_is_none_of_no_weights_and_never_exceeds_one():
    assert effective_sample_size(0.0, 0.0) == 0.0
    # Equal weights, whose means were rounded apart: seen in a training.
    assert effective_sample_size(1.000000000000128, 1.000000000000128) == 1.0


def test_losses_with_one_ratio_a_sequence_get_one_weight_a_sequence():
    assert weight_level("gspo") is weight_level("geo_mean") is WeightLevel.GEOMETRIC
    assert weight_level("vanilla") is weight_level("sapo") is weight_level("gpg") is WeightLevel.TOKEN
