"""``tests.chaos`` inflicts faults, resumes, and accounts for what was decoded; nightly e2e has real trainings."""

import sys
from types import SimpleNamespace

import pytest

from tests.chaos import victim
from tests.chaos.effects import conversations, differences

TRAINING = """#!{python}
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("Training Progress", *sys.argv[3:], flush=True)
time.sleep(600)
"""


def test_kill_ends_every_process_that_the_training_started(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(TRAINING.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(victim, "sys", SimpleNamespace(executable=str(script)))
    training = victim.Victim(["--config-name=c", "a=1"], tmp_path / "log")
    training.wait_for("Training Progress", 60)
    assert training.terminal.split() == ["Training", "Progress", "--config-name=c", "a=1"]
    leader = training._process.pid
    assert len(victim.processes_of_session(leader)) == 2 and training.exit_code is None
    training.kill()
    assert victim.processes_of_session(leader) == [] and training.exit_code is not None


def orders(root, log, said="1"):
    """What one conversation leaves in the run's folder ``root``."""
    files = root / "workspaces" / "live" / "0_3#1" / "files"
    for folder in (files, root / "transcripts"):
        folder.mkdir(parents=True)
    (files / "log").write_text(log)
    (root / "transcripts" / "0_3#1").write_text(said)
    return conversations(root)


@pytest.mark.parametrize(
    ("log", "said"),
    [("a\n", "1"), ("a\nb\nb\n", "1"), ("a\nc\n", "1"), ("a\nb\n", "2")],
    ids=["lost", "doubled", "other", "told"],
)
def test_effect_that_is_lost_or_doubled_is_seen(tmp_path, log, said):
    undisturbed = orders(tmp_path / "undisturbed", "a\nb\n")
    assert undisturbed["0_3#1"].effects == 2
    assert differences(orders(tmp_path / "same", "a\nb\n"), undisturbed) == []
    (line,) = differences(orders(tmp_path / "faults", log, said), undisturbed)
    assert "0_3#1" in line
