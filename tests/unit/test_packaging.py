"""Pins that are written in two places agree, and the scripts that a newcomer runs are whole."""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def pins():
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    found = (re.match(r"([A-Za-z0-9_.\-]+)==(\S+)", line) for line in lines)
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def test_pins_of_the_package_are_those_of_the_cpu_environment():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    frozen = pins()
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    for line in wanted:
        requirement = Requirement(line)
        name = requirement.name.lower().replace("_", "-")
        if name == "torch":
            assert f"torch{requirement.specifier}" in (ROOT / "run_scripts" / "setup.sh").read_text()
        else:
            assert str(requirement.specifier) == f"=={frozen[name]}", name


def test_gpu_extra_names_verls_tested_set():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    assert set(extra) == {"torch==2.11.0", "transformers==5.9.0", "vllm==0.24.0"}


def test_scripts_parse():
    for script in [*(ROOT / "run_scripts").glob("*.sh"), ROOT / ".ci" / "run"]:
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0, script
