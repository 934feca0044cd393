"""Paths of a config mean the same wherever a process of the run was started."""

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.preflight.verl_keys import write_in_full

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
