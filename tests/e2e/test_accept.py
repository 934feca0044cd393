"""The acceptance script itself, in small, on the CPU platform: every part runs, and is judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.timeout(1500), pytest.mark.nightly]


def test_acceptance_accepts_this_machine_without_the_checks_of_a_device(tmp_path):
    env = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "VERL_PLATFORM": "cpu"}
    command = ["bash", str(ROOT / "run_scripts" / "accept_cuda.sh")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    report = json.loads((tmp_path / "out" / "accept.json").read_text())
    assert report["accepted"] and [part["part"] for part in report["parts"]] == ["A", "B", "C"]
    names = [check["name"] for part in report["parts"] for check in part["checks"]]
    assert "masked shares" in names and "asynchronous scheduling" not in names
