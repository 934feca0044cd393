"""What a command makes of its config: one of the user's own that extends ours, and the jobs of a multirun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
MY_JOB = """\
defaults:
  - own_job
  - override engine: megatron
  - override algorithm: rloo
  - _self_

data:
  train_batch_size: 4
partial_rollout:
  overlap: 0.5
"""


@pytest.mark.parametrize(
    ("program", "option"),
    [
        ("recipe.partial_rollout.main_ppo", "--config-dir"),
        ("recipe.partial_rollout.tools.verl_trainer", "--config-path"),
    ],
)
def test_own_config_extends_ours_from_any_directory(tmp_path, monkeypatch, program, option):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_job.yaml").write_text(MY_JOB)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    given = f"{option}={tmp_path / 'mine'}", "--config-name=my_job", "arm=nopr", "--cfg=job"
    done = subprocess.run(
        [sys.executable, "-m", program, *given], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    config = OmegaConf.create(done.stdout)
    assert (config.data.train_batch_size, config.partial_rollout.overlap, config.partial_rollout.enable) == (
        4,
        0.5,
        False,
    )
    assert (config.trainer.project_name, config.algorithm.adv_estimator) == ("own_job", "rloo")
    assert config.actor_rollout_ref.actor.megatron._target_ == "verl.workers.config.McoreEngineConfig"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"], "hydra leaves no directory of its own"


def test_every_job_of_a_multirun_is_checked(tmp_path):
    given = "--check", "-m", "--config-name=own_job", "platform=cpu", "partial_rollout.overlap=-3,0.5", "algorithm=rloo"
    inputs = "actor_rollout_ref.model.path=none", "data.train_files=none.parquet"
    done = subprocess.run(
        [sys.executable, "-m", "recipe.partial_rollout.main_ppo", *given, *inputs],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert "config error: partial_rollout.overlap=-3" in done.stderr and "overlap 0.5" in done.stdout
