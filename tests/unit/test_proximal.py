"""Where a step's proximal log-probs come from, and which figures of a step without the pass are left out."""

import torch
from verl.protocol import DataProto

from recipe.partial_rollout.config.choices import Proximal
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.correction import WeightLevel, weight_level
from recipe.partial_rollout.training.proximal import ProximalPolicy

CORRECTION = type("Correction", (), {"rollout_is": "token", "rollout_is_threshold": 2.0})


def build(source=Proximal.INTERPOLATE, *, check_every=0):
    return ProximalPolicy(source, check_every, CORRECTION)


def build_batch():
    return DataProto.from_single_dict({"rollout_log_probs": torch.tensor([[-1.0, -2.0]])})


def test_recomputing_is_the_default_and_tells_the_loss_nothing():
    proximal, batch = build(Proximal.RECOMPUTE), build_batch()
    proximal.instruct(batch, 3)
    assert proximal.recomputes(1) and proximal.recomputes(2)
    assert not batch.meta_info


def test_interpolation_runs_the_pass_only_to_check_itself():
    assert not any(build().recomputes(step) for step in range(1, 9))
    assert [step for step in range(1, 9) if build(check_every=3).recomputes(step)] == [3, 6]


def test_loss_learns_the_version_before_the_update():
    batch = build_batch()
    build(check_every=2).instruct(batch, 4)
    assert batch.meta_info == {
        loss.PROXIMAL_VERSION: 3,
        loss.PROXIMAL_CHECK: True,
        loss.WEIGHT_LEVEL: "token",
        loss.WEIGHT_THRESHOLD: 2.0,
    }


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
    }
    kept = build(check_every=2).metrics(logged, 1)
    assert kept == {"training/global_step": 1, "partial_rollout/proximal/error": 0.01}
    assert "rollout_corr/kl" in build(check_every=2).metrics(logged, 2)
    assert "actor/entropy" in build(Proximal.RECOMPUTE).metrics(logged, 1)


def test_effective_sample_size_is_made_of_what_the_loss_sums():
    logged = {"actor/partial_rollout/behaviour_weight/mean": 0.5, "actor/partial_rollout/behaviour_weight/square": 1.0}
    assert build().metrics(logged, 1) == {
        "partial_rollout/behaviour_weight/mean": 0.5,
        "partial_rollout/behaviour_weight/ess": 0.25,
    }


def test_losses_with_one_ratio_a_sequence_get_one_weight_a_sequence():
    assert weight_level("gspo") is weight_level("geo_mean") is WeightLevel.GEOMETRIC
    assert weight_level("vanilla") is weight_level("sapo") is weight_level("gpg") is WeightLevel.TOKEN
