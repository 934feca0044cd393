"""run_scripts/quickstart_cpu.sh with a Python that only notes how it was called: no earlier run is lost."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """\
#!/usr/bin/env bash
echo "$*" >>"$CALLS"
arm=$([[ $* == *experiment_name=noPR* ]] && echo noPR || echo PR)
case "$*" in
  *max_stalenes=*) echo "config error: no such key" >&2; exit 2 ;;
  *experiment_name=PR*only_nopr=*) echo "config error: not with partial rollout" >&2; exit 2 ;;
  *--check*) [[ -d task ]] || exit 3 ;;
  *main_ppo*) mkdir -p out/$arm; echo "$*" >out/$arm/run ;;
esac
"""


@pytest.fixture
def quickstart(tmp_path):
    """Calls the script in a checkout of its own; exit code, and the calls of Python."""
    for name in ("quickstart_cpu.sh", "env_cpu.sh"):
        (tmp_path / "run_scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "run_scripts" / name, tmp_path / "run_scripts")
    (tmp_path / "run_scripts" / "setup.sh").write_text("")
    commands, calls = tmp_path / ".venv" / "bin", tmp_path / "calls"
    commands.mkdir(parents=True)
    (commands / "python").write_text(PYTHON)
    (commands / "python").chmod(0o755)
    (commands / "activate").write_text(f"PATH={commands}:$PATH\n")

    def call(*arguments):
        calls.write_text("")
        env = {"PATH": "/usr/bin:/bin", "CALLS": str(calls), "OUT": "out"}
        command = ["bash", "run_scripts/quickstart_cpu.sh", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, calls.read_text().splitlines()

    return call


@pytest.mark.parametrize("arguments", [["partial_rollout.max_stalenes=2"], ["--help"], ["-h"], ["--cfg", "job"]])
def test_finished_run_stays_where_it_is_if_the_arguments_do_not_hold_or_ask_for_help(quickstart, tmp_path, arguments):
    assert quickstart("data.seed=1")[0] == 0
    before = {path: path.read_text() for path in sorted((tmp_path / "out").rglob("*")) if path.is_file()}
    code, calls = quickstart(*arguments)
    assert code == (0 if arguments[0] in ("--help", "-h") else 2)
    assert {path: path.read_text() for path in sorted((tmp_path / "out").rglob("*")) if path.is_file()} == before
    assert all("--check" in call for call in calls)


def test_each_earlier_run_is_kept_beside_the_new_one(quickstart, tmp_path):
    for seed in (1, 2, 3):
        assert quickstart(f"data.seed={seed}")[0] == 0
    for arm in ("noPR", "PR"):
        kept = {name: (tmp_path / "out" / name / "run").read_text() for name in (f"{arm}.1", f"{arm}.2", arm)}
        assert [f"data.seed={seed}" in text for seed, text in enumerate(kept.values(), 1)] == [True] * 3


def test_mistake_that_concerns_partial_rollout_alone_is_told_before_the_other_arm_is_trained(quickstart, tmp_path):
    code, calls = quickstart("only_nopr=1")
    assert code == 2 and not (tmp_path / "out").exists() and all("--check" in call for call in calls)
