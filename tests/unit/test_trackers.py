"""A run in the trackers: where it is logged, and under which id."""

import json
import os
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.training.trackers import check_trackers, open_run


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """A user without a key, in a process whose environment says nothing of SwanLab."""
    named = {name for name in os.environ if name.startswith(("SWANLAB_", "WANDB_"))}
    ours = {f"{tracker}_{what}" for tracker in ("SWANLAB", "WANDB") for what in ("RUN_ID", "RESUME")}
    for name in named | ours | {"SWANLAB_MODE"}:
        # What the code sets is taken back at the test's end.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "account"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("asked", "key", "mode"),
    [
        (None, None, "local"),
        (None, "variable", "cloud"),
        (None, "login", "cloud"),
        ("local", "variable", "local"),
        ("offline", "variable", "offline"),
        ("cloud", None, "SWANLAB_MODE=cloud: a key in SWANLAB_API_KEY"),
        ("remote", None, "SWANLAB_MODE=remote: cloud, local"),
    ],
)
def test_a_run_goes_to_the_cloud_with_a_key_unless_the_user_says_otherwise(monkeypatch, tmp_path, asked, key, mode):
    if key == "variable":
        monkeypatch.setenv("SWANLAB_API_KEY", "a-key")
    if key == "login":
        (tmp_path / "account").mkdir()
        login = "machine https://api.swanlab.cn\n\tlogin https://swanlab.cn\n\tpassword a-key\n"
        (tmp_path / "account" / ".netrc").write_text(login)
    if asked:
        monkeypatch.setenv("SWANLAB_MODE", asked)
    check_trackers(["file", "mlflow"])
    assert os.environ.get("SWANLAB_MODE") == asked, "another logger leaves SwanLab alone"
    if mode.startswith("SWANLAB_MODE"):
        with pytest.raises(ConfigError, match=mode):
            check_trackers(["swanlab"])
    else:
        check_trackers(["file", "swanlab"])
        assert os.environ["SWANLAB_MODE"] == mode
        # With a key verl would log in to the cloud, whatever the mode.
        open_run(["file", "swanlab"], "a1")
        assert os.environ.get("SWANLAB_API_KEY") == ("a-key" if (key, mode) == ("variable", "cloud") else None)


@pytest.mark.parametrize(
    ("mode", "key", "logged_in", "refused"),
    [
        ("online", None, False, r"no key is configured"),
        ("online", None, ValueError("too short"), r"too short"),
        ("online", None, True, None),
        ("online", "a-key", False, None),
        ("online", None, TypeError("an older wandb has no such argument"), None),
        ("offline", None, False, None),
        ("disabled", None, False, None),
    ],
)
def test_wandb_without_a_login_is_refused_before_verl_would_ask(monkeypatch, mode, key, logged_in, refused):
    """A library's stub: wandb is not installed here."""
    ended = []

    def login(**how):
        assert how == {"prompt": False, "verify": False}
        if isinstance(logged_in, Exception):
            raise logged_in
        return logged_in

    settings = SimpleNamespace(settings=SimpleNamespace(mode=mode))
    wandb = SimpleNamespace(setup=lambda: settings, login=login, teardown=lambda: ended.append(True))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    check_trackers(["file"])
    if refused:
        with pytest.raises(ConfigError, match=rf"^trainer.logger=wandb: .*WANDB_MODE=offline \(.*{refused}\)$"):
            check_trackers(["file", "wandb"])
    else:
        check_trackers(["file", "wandb"])
        assert key or ended, "its settings would be as they were before the run had its id"


def test_each_run_of_a_multirun_has_a_tracker_id_unless_the_user_has(monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    for run in ("a1", "b2"):
        open_run(["file"], run)
        assert (os.environ["SWANLAB_RUN_ID"], os.environ["WANDB_RUN_ID"]) == (run, "mine")
        assert os.environ["SWANLAB_RESUME"] == os.environ["WANDB_RESUME"] == "allow"
    # A validation alone has no id, and does not go into the run before it.
    open_run(["swanlab"], None)
    assert not {"SWANLAB_RUN_ID", "SWANLAB_RESUME", "WANDB_RESUME"} & os.environ.keys()
    assert os.environ["WANDB_RUN_ID"] == "mine"


def on_a_board(script, board):
    """Run ``script``, which logs to a local board; returns what it wrote to stderr."""
    begins = """
import os, sys
os.environ |= {"SWANLAB_MODE": "local", "SWANLAB_LOG_DIR": sys.argv[1], "SWANLAB_RUN_ID": "a1b2c3d4"}
from verl_ext import swanlab_board
swanlab_board.install()
from verl.utils.tracking import Tracking
"""
    command = [sys.executable, "-W", "ignore", "-c", begins + script, str(board)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


LOGGED = """
for first, value in ((1, 1.0), (3, 2.0)):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    log = Tracking("project", "run", ["swanlab"], {})
    for step in range(first, 5):
        loss = {2: float("nan"), 3: float("-inf")}.get(step, value)
        log.log({"actor/loss": loss, "actor/lr": value, "never": float("inf")}, step)
    log.finish()
    break
"""
"""two processes, which share their imports"""


def test_local_board_keeps_the_last_finite_value_of_each_step(tmp_path):
    """Its page answers 500 for a metric that was nan or inf once. The second process resumes the first."""
    on_a_board(LOGGED, tmp_path)
    newest = max(tmp_path.glob("run-*"))
    lines = [json.loads(line) for file in newest.glob("logs/*/*.log") for line in file.read_text().splitlines()]
    assert sorted((line["index"], line["data"]) for line in lines) == [(1, 1), (1, 1), (2, 1), (3, 2), (4, 2), (4, 2)]


ENDS = """
del os.environ["SWANLAB_RUN_ID"]
from recipe.partial_rollout.rollout.stop import StopTraining
from verl_ext.tracking_observer import observed_tracking
endings = {"ends": None, "fails": RuntimeError("no memory"), "stopped": StopTraining(2), "killed": KeyboardInterrupt()}
for name, ending in endings.items():
    try:
        with observed_tracking(lambda data, step: data):
            from verl.utils.tracking import Tracking
            kept = Tracking("project", name, ["swanlab"], {})
            kept.log({"actor/loss": 1.0}, 1)
            if ending:
                raise ending
    except BaseException as error:
        assert error is ending
"""
"""trainings of one process, as of a multirun, each with a run of its own on the board"""


def test_board_shows_only_a_whole_training_as_finished(tmp_path):
    on_a_board(ENDS, tmp_path)
    with sqlite3.connect(tmp_path / "runs.swanlab") as board:
        shown = dict(board.execute("select name, status from experiment"))
    assert shown == {"ends": 1, "fails": -1, "stopped": -1, "killed": -1}
    (error,) = [text for path in tmp_path.glob("run-*/**/error.log") if "memory" in (text := path.read_text())]
    assert "RuntimeError: no memory" in error
