"""Paths of a config mean the same wherever a process of the run was started, and fit sockets and readers."""

from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight.paths import check_sockets, write_in_full
from recipe.partial_rollout.preflight.rows import check_patterns

HERE = ("model", "train.parquet", "reward.py", "loops.yaml", "more/val.parquet", "own_set.py", "weights/adapter")
CONFIG = {
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.model.tokenizer_path": "Qwen/Qwen3-0.6B",
    "actor_rollout_ref.model.lora_adapter_path": "weights/adapter",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": "loops.yaml",
    "data.train_files": "train.parquet",
    "data.val_files": ["more/val.parquet", "hdfs://far/val.parquet"],
    "data.custom_cls.path": "own_set.py",
    "reward.custom_reward_function.path": "reward.py",
    "reward.reward_manager.module.path": "pkg://mine.manager",
    "trainer.default_local_dir": "outputs/run",
    "trainer.rollout_data_dir": "dumps",
    "trainer.validation_data_dir": None,
    "trainer.project_name": "model",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name in HERE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths_are_absolute_but_for_names_of_the_hub_and_addresses(here):
    config = OmegaConf.create({})
    for key, value in CONFIG.items():
        OmegaConf.update(config, key, value, force_add=True)
    write_in_full(config)
    unchanged = ("Qwen/Qwen3-0.6B", "hdfs://far/val.parquet", "pkg://mine.manager", None)
    for key, given in CONFIG.items():
        wanted = [
            each if each in unchanged or key.endswith("name") else str(here / each)
            for each in (given if isinstance(given, list) else [given])
        ]
        assert OmegaConf.select(config, key) == (wanted if isinstance(given, list) else wanted[0]), key


def test_every_path_of_the_quick_start_is_written_in_full(resolved_config, here):
    config = resolved_config("quickstart_cpu", "quickstart.dir=out", "trainer.rollout_data_dir=dumps")
    write_in_full(config)
    assert config.trainer.default_local_dir == str(here / "out" / "PR")
    assert config.trainer.rollout_data_dir == str(here / "dumps")


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_temporary_directory_that_is_too_long_for_a_socket_is_refused(monkeypatch, name):
    config = OmegaConf.create({"ray_kwargs": {"ray_init": {}}})
    for variable in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    check_sockets(config)
    monkeypatch.setenv(name, "/tmp/" + "d" * 60)
    with pytest.raises(ConfigError, match=rf"^{name}=/tmp/d+: a path of at most \d+ bytes, or Ray's sockets") as caught:
        check_sockets(config)
    most = int(str(caught.value).partition("at most ")[2].split()[0])
    monkeypatch.setenv(name, ("/tmp/" + "d" * 60)[:most])
    check_sockets(config)
    monkeypatch.setenv(name, "/tmp/" + "d" * 60)
    config.ray_kwargs.ray_init._temp_dir = "/tmp/short"
    check_sockets(config)
    config.ray_kwargs.ray_init._temp_dir = "/tmp/" + "d" * 60
    with pytest.raises(ConfigError, match=r"^ray_kwargs.ray_init._temp_dir=/tmp/d+: "):
        check_sockets(config)
    config.ray_kwargs.ray_init.address = "head:6379"
    check_sockets(config)


def test_data_path_that_its_reader_takes_for_a_pattern_is_refused(resolved_config, tmp_path):
    """Where ``a1`` is there, it would be read in place of ``a[1]``."""
    row = {"prompt": [{"role": "user", "content": "?"}], "data_source": "clock10", "reward_model": {"ground_truth": ""}}
    for folder in ("a[1]", "a1"):
        (tmp_path / folder).mkdir()
        pd.DataFrame([row]).to_parquet(tmp_path / folder / "x.parquet")
    config = resolved_config("quickstart_cpu")
    config.data.train_files = config.data.val_files = str(tmp_path / "a1" / "x.parquet")
    check_patterns(config)
    config.data.val_files = str(Path(tmp_path) / "a[1]" / "x.parquet")
    with pytest.raises(
        ConfigError, match=r"^data.val_files=[^\n]*: a path without \[ \], which the reader of data files"
    ):
        check_patterns(config)
