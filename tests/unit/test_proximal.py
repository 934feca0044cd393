"""Where a step's proximal log-probs come from, and which figures of a step without the pass are left out."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.loss import ProximalPolicy, UpdateOrder, needs_pass
from recipe.partial_rollout.training.trainer_run import PartialRolloutRayPPOTrainer
from tests.unit.shared import settings_of

CORRECTION = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": None,
    "rollout_is_batch_normalize": False,
}


def build(*, from_update=True):
    actor = {"ppo_epochs": 1 if from_update else 2, "ppo_mini_batch_size": 8}
    algorithm = {"rollout_correction": CORRECTION, "use_kl_in_reward": False, "adv_estimator": "grpo"}
    config = {"actor_rollout_ref": {"actor": actor}, "algorithm": algorithm, "data": {"train_batch_size": 8}}
    return ProximalPolicy(OmegaConf.create(config), settings_of())


def build_batch():
    return DataProto.from_single_dict({"rollout_log_probs": torch.tensor([[-1.0, -2.0]])})


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
    ],
)
def test_pass_is_left_out_but_in_every_tenth_step_unless_something_needs_it(composed_config, override, needed):
    config = composed_config("quickstart_cpu", override)
    assert needs_pass(config) is bool(needed)
    proximal = ProximalPolicy(config, PartialRolloutConfig.from_config(config))
    runs = [step for step in range(1, 22) if proximal.recomputes(step)]
    assert runs == ([1, 11, 21] if needed is False else list(range(1, 22)))


def test_loss_learns_how_to_weigh_and_what_to_check():
    for step, checks in ((11, True), (12, False)):
        batch, recomputed = build_batch(), build_batch()
        build().instruct(batch.meta_info, step)
        assert batch.meta_info == {loss.ORDER: UpdateOrder(step - 1, True, checks, "token", 2.0)}
        build(from_update=False).instruct(recomputed.meta_info, step)
        assert not recomputed.meta_info[loss.ORDER].from_update


def test_verls_driver_compares_a_stand_in_with_nothing_and_the_update_has_both(monkeypatch):
    monkeypatch.setattr(RayPPOTrainer, "_update_actor", lambda self, batch: batch.batch)
    trainer, batch = object.__new__(PartialRolloutRayPPOTrainer), build_batch()
    vars(trainer).update(proximal=build(), global_steps=2, session=SimpleNamespace(settings=settings_of()))
    batch = batch.union(trainer._compute_old_log_prob(batch)[0])
    # This is what verl's ``fit`` asks before it compares the two.
    assert "rollout_log_probs" not in batch.batch
    updated = trainer._update_actor(batch)
    for key in ("old_log_probs", "rollout_log_probs"):
        assert updated[key].tolist() == [[-1.0, -2.0]]


def test_figures_of_the_stand_in_give_way_to_the_losses_own():
    verls = dict.fromkeys(("actor/entropy", "perf/mfu/actor_infer", "rollout_corr/k3_kl"), 0.0)
    verls |= {"training/rollout_probs_diff_max": 0.0, "training/global_step": 1}
    made = {"actor/entropy": 0.7, "rollout_corr/k3_kl": 0.002, "partial_rollout/trust_region/masked": 0.1}
    weights, gap = (
        {"rollout_corr/rollout_is_mean": 0.5, loss.WEIGHT_SQUARE: 1.0},
        {"kv_gap": 0.01, "kv_gap_share": 0.25},
    )
    data = verls | {f"actor/logged/{key}": value for key, value in (made | weights | gap).items()}
    ours = {"rollout_corr/rollout_is_mean": 0.5, "rollout_corr/rollout_is_eff_sample_size": 0.25}
    gap_mean = {"partial_rollout/mismatch/kv_gap_mean": 0.04}
    assert build().metrics(data, 2) == {"training/global_step": 1} | made | ours | gap_mean
    passed = verls | {"actor/logged/kv_gap": 0.01, "actor/logged/kv_gap_share": 0.0}
    assert build().metrics(passed, 11) == verls, "a step with the pass"


def test_effective_sample_size_is_none_of_no_weights_and_never_exceeds_one():
    def share(mean, square):
        figures = {f"actor/logged/{loss.WEIGHT_MEAN}": mean, f"actor/logged/{loss.WEIGHT_SQUARE}": square}
        return build().metrics(figures, 2)["rollout_corr/rollout_is_eff_sample_size"]

    assert share(0.0, 0.0) == 0.0
    # Equal weights, whose means were rounded apart: seen in a training.
    assert share(1.000000000000128, 1.000000000000128) == 1.0
