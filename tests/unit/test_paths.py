"""Paths of a config mean the same wherever a process of the run was started."""

from omegaconf import OmegaConf

from recipe.partial_rollout.preflight.verl_keys import write_in_full

HERE = ("model", "train.parquet", "more/val.parquet", "reward.py")
CONFIG = {
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.model.tokenizer_path": "Qwen/Qwen3-0.6B",
    "data.train_files": "train.parquet",
    "data.val_files": ["more/val.parquet", "hdfs://far/val.parquet"],
    "reward.custom_reward_function.path": "reward.py",
    "reward.reward_manager.module.path": "pkg://mine.manager",
    "trainer.default_local_dir": "outputs/run",
    "trainer.rollout_data_dir": "~/dumps",
    "trainer.validation_data_dir": None,
    "trainer.project_name": "model",
}
UNCHANGED = ("Qwen/Qwen3-0.6B", "hdfs://far/val.parquet", "pkg://mine.manager", None)


def test_paths_are_absolute_but_for_names_of_the_hub_and_addresses(tmp_path, monkeypatch):
    for name in HERE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = OmegaConf.create({})
    for key, value in CONFIG.items():
        OmegaConf.update(config, key, value, force_add=True)
    write_in_full(config)
    for key, given in CONFIG.items():
        listed = given if isinstance(given, list) else [given]
        wanted = [
            each if each in UNCHANGED or key.endswith("name") else str(tmp_path / each.removeprefix("~/"))
            for each in listed
        ]
        assert OmegaConf.select(config, key) == (wanted if isinstance(given, list) else wanted[0]), key
