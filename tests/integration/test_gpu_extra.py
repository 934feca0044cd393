"""The extra ``gpu`` can be installed: its pins and all below them have a solution, and the lock file is one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = "requirements-gpu.txt"
UNREACHABLE = re.compile(r"failed to fetch|error sending request|network|connect|dns|timed out|offline", re.I)

pytest.importorskip("uv", reason="uv is in the extra dev: bash run_scripts/setup.sh")


def resolve(python):
    """Version by package that uv chooses for the extra within the lock file; the test is skipped where no index answers."""
    extras = ("--extra", "gpu", "--extra", "dev", "--constraint", LOCK)
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *extras, "pyproject.toml"]
    target = ["--python-version", python, "--python-platform", "x86_64-unknown-linux-gnu"]
    try:
        done = subprocess.run([*command, *target], cwd=ROOT, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index did not answer within 120 s")
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return versions(done.stdout)


def versions(text):
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.M))


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_lock_file_is_a_solution_and_has_nothing_else(python):
    """``setup.sh`` installs it without dependencies, so a package that it lacked would be missing."""
    locked = versions((ROOT / LOCK).read_text())
    assert resolve(python) == locked
    # vLLM brings kernels of its own; verl's default attention is another package (verl_ext/packed_attention.py).
    assert "flash-attn" not in locked
