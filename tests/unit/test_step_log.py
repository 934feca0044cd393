"""What is added to a logged step, and printed."""

import time
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.training import step_log
from recipe.partial_rollout.training.step_log import StepLog

K3 = "rollout_corr/k3_kl"


def build_log(tmp_path, *, enable=True, separate=False):
    config = OmegaConf.create({"trainer": {"logger": ["file"]}, "actor_rollout_ref": {"rollout": {}}})
    settings = SimpleNamespace(enable=enable, separate=separate, dashboard=SimpleNamespace(pictures_every=0))
    return StepLog(config, settings, tmp_path, total_steps=20)


@pytest.fixture(autouse=True)
def no_gauges(monkeypatch):
    monkeypatch.setattr("recipe.partial_rollout.training.dashboard.Gauges.of", lambda config: None)


def test_a_step_tells_how_long_the_log_of_the_step_before_took(tmp_path):
    log = build_log(tmp_path)

    first = log.extend({"training/global_step": 1}, 1)
    time.sleep(0.05)
    log.close(1, None)
    second = log.extend({"training/global_step": 2}, 2)

    assert first["partial_rollout/timing/log_s"] == 0.0
    assert 0.05 <= second["partial_rollout/timing/log_s"] < 1.0


@pytest.mark.parametrize("enable", [True, False])
def test_drift_is_noticed_under_partial_rollout_alone(tmp_path, monkeypatch, enable):
    printed = []
    monkeypatch.setattr(step_log.tqdm, "write", printed.append)
    log = build_log(tmp_path, enable=enable)

    for step in range(1, 12):
        log.extend({"training/global_step": step, K3: 1e-4}, step)
    log.extend({"training/global_step": 12, K3: 0.1}, 12)

    assert any("drift" in line for line in printed) is enable


@pytest.mark.parametrize("enable", [True, False])
def test_a_loss_that_is_no_number_is_printed_in_its_step_in_both_arms(tmp_path, monkeypatch, enable):
    printed = []
    monkeypatch.setattr(step_log.tqdm, "write", printed.append)
    log = build_log(tmp_path, enable=enable)
    log.extend({"training/global_step": 1, "actor/loss": float("nan")}, 1)
    assert any("actor/loss nan" in line and "step 1" in line for line in printed)


@pytest.mark.parametrize(("separate", "got"), [(False, "rollout"), (True, "wait")])
def test_the_line_of_a_step_says_what_the_trainer_got_its_batch_from(tmp_path, monkeypatch, separate, got):
    printed = []
    monkeypatch.setattr(step_log.tqdm, "write", printed.append)
    log = build_log(tmp_path, separate=separate)
    log.extend({"training/global_step": 1, "timing_s/gen": 1.0, "timing_s/step": 3.0}, 1)
    assert f"3.0 s = {got} 1.0 + train 2.0" in printed[0]
