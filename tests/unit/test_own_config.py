"""What a command makes of its config: one of the user's own that extends ours, its paths, the jobs of a multirun."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.preflight.verl_keys import write_in_full

ROOT = Path(__file__).resolve().parents[2]
MY_JOB = """\
defaults: [own_job, {override engine: megatron}, {override algorithm: rloo}, _self_]
data: {train_batch_size: 4}
partial_rollout: {overlap: 0.5}
"""


def run(directory, module, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", f"recipe.partial_rollout.{module}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=directory, timeout=300, env=environment)


def test_own_config_extends_ours_from_any_directory(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_job.yaml").write_text(MY_JOB)
    done = run(
        tmp_path, "main_ppo", f"--config-dir={tmp_path / 'mine'}", "--config-name=my_job", "arm=nopr", "--cfg=job"
    )
    assert done.returncode == 0, done.stderr
    config = OmegaConf.create(done.stdout)
    ours = config.partial_rollout
    assert (config.data.train_batch_size, ours.overlap, ours.enable) == (4, 0.5, False)
    assert (config.trainer.project_name, config.algorithm.adv_estimator) == ("own_job", "rloo")
    assert config.actor_rollout_ref.actor.megatron._target_ == "verl.workers.config.McoreEngineConfig"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"], "hydra leaves no directory of its own"


def test_own_config_that_ours_would_hide_is_refused(tmp_path):
    for name in ("own_job.yaml", "algorithm/dapo.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        done = run(tmp_path, "main_ppo", "--config-dir=.", "--config-name=own_job", "--check")
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert f"/conf/{name} in place of {name}: give that file another name" in done.stderr
        (tmp_path / name).unlink()


def test_every_job_of_a_multirun_is_checked_and_needs_a_directory_of_its_own(tmp_path):
    """In the directory of an earlier job it would resume that job."""
    given = "--check", "-m", "--config-name=own_job", "platform=cpu", "partial_rollout.overlap=-3,0.5", "algorithm=rloo"
    given = *given, "actor_rollout_ref.model.path=none", "data.train_files=none.parquet"
    own = run(tmp_path, "main_ppo", *given, "trainer.experiment_name=job${hydra:job.num}")
    assert own.returncode == 2, own.stderr
    assert "config error: partial_rollout.overlap=-3" in own.stderr and "overlap 0.5" in own.stdout
    shared = run(tmp_path, "main_ppo", *given)
    assert shared.returncode == 2 and "overlap 0.5" not in shared.stdout
    words = "another directory for each job of a multirun, as with 'trainer.experiment_name=job${hydra:job.num}'"
    assert f"config error: trainer.default_local_dir=outputs/own_job/pr: {words}" in shared.stderr


def test_validations_of_a_multirun_may_share_a_directory(capsys):
    """They train nothing there, so that no job would resume another one's training."""
    for val_only in (True, False):
        config = OmegaConf.create({"trainer": {"default_local_dir": "run", "val_only": val_only}})
        directories = set()
        main_ppo.claim_directory(config, directories)
        with contextlib.nullcontext() if val_only else pytest.raises(SystemExit):
            main_ppo.claim_directory(config, directories)
    assert "another directory for each job of a multirun" in capsys.readouterr().err


def test_paths_are_absolute_but_for_names_of_the_hub_and_addresses(tmp_path, monkeypatch):
    """They mean the same wherever a process of the run was started."""
    for name in ("model", "train.parquet", "val.parquet", "reward.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    hub, far, package = "Qwen/Qwen3-0.6B", "hdfs://far/val.parquet", "pkg://mine.manager"
    paths = {
        "actor_rollout_ref.model.path": ("model", f"{tmp_path}/model"),
        "actor_rollout_ref.model.tokenizer_path": (hub, hub),
        "data.train_files": ("train.parquet", f"{tmp_path}/train.parquet"),
        "data.val_files": (["val.parquet", far], [f"{tmp_path}/val.parquet", far]),
        "reward.custom_reward_function.path": ("reward.py", f"{tmp_path}/reward.py"),
        "reward.reward_manager.module.path": (package, package),
        "trainer.default_local_dir": ("outputs/run", f"{tmp_path}/outputs/run"),
        "trainer.rollout_data_dir": ("~/dumps", f"{tmp_path}/dumps"),
        "trainer.validation_data_dir": ("~", str(tmp_path)),
        # Of the clone, only what lies in conf/ is found from elsewhere.
        "critic.model.path": ("pyproject.toml", "pyproject.toml"),
        "critic.model.tokenizer_path": ("conf/own_job.yaml", f"{ROOT}/conf/own_job.yaml"),
        "critic.model.config_path": (None, None),
        "trainer.project_name": ("model", "model"),
        # verl takes a single one for a list, too.
        "trainer.logger": ("tracking", ["wandb"]),
    }
    config = OmegaConf.create({})
    for key, (given, _) in paths.items():
        OmegaConf.update(config, key, given, force_add=True)
    write_in_full(config)
    assert {key: OmegaConf.select(config, key) for key in paths} == {key: wanted for key, (_, wanted) in paths.items()}
