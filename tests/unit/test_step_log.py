"""What is added to a logged step, and printed: a line, and a warning when the policy runs away from its samples."""

from math import inf, nan
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.training import step_log
from recipe.partial_rollout.training.step_log import KL, PolicyDrift, StepLog


@pytest.mark.parametrize("enable", [True, False])
def test_drift_is_told_under_partial_rollout_alone_and_a_loss_that_is_no_number_in_both_arms(monkeypatch, enable):
    printed = []
    monkeypatch.setattr(step_log.tqdm, "write", printed.append)
    config = OmegaConf.create({"trainer": {"logger": ["file"]}, "actor_rollout_ref": {"rollout": {}}})
    log = StepLog(config, SimpleNamespace(enable=enable, separate=False), total_steps=20)
    for step in range(1, 12):
        log.extend({"training/global_step": step, KL: 1e-4}, step)
    log.extend({"training/global_step": 12, KL: 0.1, "actor/loss": nan}, 12)
    drift = [line for line in printed if "step 12 the policy has drifted" in line]
    assert [f"{KL} 0.1000, 0.00010 by the median" in line for line in drift] == [True] * enable
    assert all("lr_scheduler_type=cosine" in line for line in drift)
    assert any("actor/loss nan" in line and "step 12" in line for line in printed)


WELL = [0.0002] * 8


@pytest.mark.parametrize(
    ("values", "warned_at"),
    [
        ([*WELL, 0.0085, 0.0157, 0.0387], [9]),
        # Again only after it was over.
        ([*WELL, 0.0085, 0.0001, 0.0157], [9, 11]),
        # Large while much is learnt, and a floor below which factors mean nothing.
        ([0.0, 0.0002, 0.0009, 0.0007, 0.0002, 0.0001, 0.0001, 0.00001, 0.0019, 0.0005], []),
        # First steps, and a run that always was far off.
        ([0.02, 0.3, 0.02, 0.03, 0.02], []),
        ([0.02] * 10, []),
    ],
)
def test_drift_is_told_when_it_sets_in(values, warned_at):
    drift = PolicyDrift()
    assert [step for step, kl in enumerate(values, 1) if drift.observe({KL: kl}, step)] == warned_at


@pytest.mark.parametrize(("key", "value"), [(KL, inf), ("actor/grad_norm", nan), ("critic/vf_loss", -inf)])
def test_figure_that_is_not_finite_is_told_by_name_in_its_own_step_and_hides_no_later_drift(key, value):
    drift = PolicyDrift()
    assert not any(drift.observe({KL: 0.0005}, step) for step in range(7))
    data = {KL: 0.0005, "actor/entropy": 1.0, key: value}
    warning = step_log.not_finite(data, 7)
    assert warning is not None and "step 7" in warning and f"{key} {value}" in warning
    assert "actor/entropy" not in warning and drift.observe(data, 7) is None
    assert drift.observe({KL: 0.0005}, 8) is None
    assert drift.observe({KL: 0.5}, 9) is not None
