"""A run in SwanLab: where it is logged, under which id, what its table and its pictures show."""

import os

import numpy as np
import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.records.calls import EngineCall, RolloutPhase
from recipe.partial_rollout.records.trace import RoundRecord
from recipe.partial_rollout.training import swanlab_run
from recipe.partial_rollout.training.round_pictures import timeline
from recipe.partial_rollout.training.swanlab_run import ID_FILE, LONGEST, choose_mode, name_run


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """A user without a key, in a process whose environment says nothing of SwanLab."""
    named = {name for name in os.environ if name.startswith("SWANLAB_")}
    for name in named | {"SWANLAB_MODE", "SWANLAB_RUN_ID", "SWANLAB_RESUME", "SWANLAB_EXP_COLOR"}:
        # What the code sets is taken back at the test's end.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "account"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("key", "asked", "mode"),
    [(False, None, "local"), (True, None, "cloud"), (True, "local", "local"), (True, "offline", "offline")],
)
def test_a_run_goes_to_the_cloud_with_a_key_unless_the_user_says_otherwise(monkeypatch, key, asked, mode):
    if key:
        monkeypatch.setenv("SWANLAB_API_KEY", "a-key")
    if asked:
        monkeypatch.setenv("SWANLAB_MODE", asked)
    choose_mode(["file", "wandb"])
    assert os.environ.get("SWANLAB_MODE") == asked, "another logger leaves SwanLab alone"
    choose_mode(["file", "swanlab"])
    assert os.environ["SWANLAB_MODE"] == mode


def test_a_login_is_as_good_as_a_key(tmp_path):
    account = tmp_path / "account"
    account.mkdir()
    (account / ".netrc").write_text("machine https://api.swanlab.cn\n\tlogin https://swanlab.cn\n\tpassword a-key\n")
    choose_mode(["swanlab"])
    assert os.environ["SWANLAB_MODE"] == "cloud"


@pytest.mark.parametrize(("mode", "words"), [("cloud", "a key in SWANLAB_API_KEY"), ("remote", "cloud, local")])
def test_a_mode_that_cannot_work_is_refused_before_ray_starts(monkeypatch, mode, words):
    monkeypatch.setenv("SWANLAB_MODE", mode)
    with pytest.raises(ConfigError, match=f"SWANLAB_MODE={mode}: {words}"):
        choose_mode(["swanlab"])


def test_a_resumed_run_keeps_its_id_and_a_new_one_gets_another(tmp_path):
    ids = []
    for resumes in (True, False, True):
        name_run(tmp_path, resumes=resumes)
        ids.append(os.environ.pop("SWANLAB_RUN_ID"))
    assert ids[0] != ids[1] == ids[2] == (tmp_path / ID_FILE).read_text().strip()
    assert os.environ["SWANLAB_RESUME"] == "allow"


def test_a_run_has_a_colour_of_its_arm_and_a_flat_and_short_table(tmp_path, monkeypatch):
    monkeypatch.setattr(swanlab_run, "_overridden", lambda: iter(["trainer.nested"]))
    config = OmegaConf.create(
        {
            "partial_rollout": {"enable": True, "deadlines": {"stall_s": 60.0}},
            "actor_rollout_ref": {"model": {"path": "/models/" + "x" * 3000}, "rollout": {"n": 8, "engine_kwargs": {}}},
            "data": {"train_batch_size": 64},
            "trainer": {"experiment_name": "PR", "nested": {"a": {"b": 1}}},
        }
    )
    tables, colours = [], set()
    for config.partial_rollout.enable in (True, False):
        tables.append(swanlab_run.open_run(config, tmp_path, resumes=False))
        colours.add(os.environ.pop("SWANLAB_EXP_COLOR"))
    assert [table["arm"] for table in tables] == ["PR", "noPR"] and len(colours) == 2
    table = tables[0]
    assert table["verl"] == "0.9.1" and table["data.train_batch_size"] == 64
    assert table["trainer.nested.a.b"] == 1, "what the command line overrides"
    assert not [value for value in table.values() if isinstance(value, dict) or len(str(value)) > LONGEST]


def test_the_timeline_tells_ended_from_interrupted_calls_and_shows_those_that_began_before_the_round():
    def colours(start, *calls):
        pixels = timeline(RoundRecord(4, 3, RolloutPhase(start, 110.0, calls), []))
        return {tuple(colour) for colour in np.unique(pixels.reshape(-1, 4), axis=0)}

    whole, cut = EngineCall(0, 95.0, 112.0, 5, 3), EngineCall(1, 101.0, 105.0, 5, 3, interrupted=True)
    ended, interrupted, round_ = (0, 0x72, 0xB2, 255), (0xD5, 0x5E, 0, 255), (0xFB, 0xF3, 0xD0, 255)
    assert {ended, interrupted, round_} <= colours(100.0, whole, cut)
    assert round_ not in colours(95.0, EngineCall(0, 96.0, 109.0, 5, 3)), "all calls are of this round"
