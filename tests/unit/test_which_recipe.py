"""Another recipe of the same module path never runs in place of this one without a word."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo, preflight
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.tools.check import machine
from verl_ext import command

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "recipe" / "partial_rollout"
SCRIPT = "import sys\nfrom verl_ext.command import main\nsys.exit(main())\n"
"""what pip makes of an entry of [project.scripts]"""


@pytest.fixture(params=["namespace", "regular"])
def foreign(request, tmp_path):
    """A checkout with a recipe of the same name; its ``recipe`` is a regular package or, as ours, a namespace."""
    package = tmp_path / "foreign" / "recipe" / "partial_rollout"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "main_ppo.py").write_text("print('theirs')\n")
    if request.param == "regular":
        (package.parent / "__init__.py").touch()
    return package.parents[1]


@pytest.fixture
def script(tmp_path):
    """The installed console script; Python puts its directory on the path, not the current one."""
    path = tmp_path / "bin" / "partial-rollout"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def python(*arguments, cwd, path=(ROOT,)):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=120)


def refusal(done):
    """The one line that a refused start prints."""
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


def test_script_refuses_a_foreign_checkout_around_it_and_on_pythonpath(foreign, script, tmp_path):
    """In the first, its Ray workers would run theirs. verl itself works there, with our patches in its processes."""
    line = refusal(python(script, "train", "--cfg", "job", cwd=foreign))
    assert f"a Ray worker would import recipe.partial_rollout from {foreign}/recipe/partial_rollout" in line
    line = refusal(python(script, "tools", "audit", cwd=tmp_path, path=(foreign, ROOT)))
    assert "this process would import" in line and line.endswith("or remove the former from PYTHONPATH")
    done = python("-c", "import verl.trainer.constants_ppo as module; print(module.__name__)", cwd=foreign)
    assert done.stdout.strip().endswith("verl.trainer.constants_ppo"), done.stderr


def test_help_of_train_says_what_is_ours_before_what_is_hydras(monkeypatch, capsys):
    monkeypatch.setattr(command, "foreign_recipe", lambda: None)
    monkeypatch.setattr(sys, "argv", ["partial-rollout"])
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    with warnings.catch_warnings(), pytest.raises(SystemExit) as caught:
        command.main(["train", "--help"])
    assert not caught.value.code
    said = capsys.readouterr().out
    assert said.startswith("usage: partial-rollout train")
    assert said.index("--check ") < said.index("groups (GROUP=NAME)") < said.index("--hydra-help")


def test_trainer_and_check_refuse_where_ray_workers_would_import_theirs(foreign, monkeypatch):
    monkeypatch.chdir(foreign)
    said = f"a Ray worker would import recipe.partial_rollout from {foreign}"
    with pytest.raises(ConfigError, match=f"^{said}"):
        main_ppo.run(OmegaConf.create())
    assert said in machine.stack().text


@pytest.mark.parametrize("file", ["verl/__init__.py", "datasets.py"])
def test_package_of_the_working_directory_that_hides_an_installed_one_is_refused(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # Such as SwanLab's, or verl's checkout from its parent: without __init__.py it hides nothing.
    (tmp_path / "ray").mkdir()
    assert command.foreign_recipe() is None
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    name = file.partition("/")[0].removesuffix(".py")
    said = f"a Ray worker would import {name} from {tmp_path / file}, not from "
    assert command.foreign_recipe().startswith(said)
    monkeypatch.syspath_prepend(tmp_path)
    assert command.foreign_recipe() is None, "where this process imports it, too, it is what the user wants"


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(command, "_DEVICES", ())
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("VERL_PLATFORM", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("platform", "variables", "line"),
    [
        ("cpu", {}, "trainer.device=cpu: needs VERL_PLATFORM=cpu in the environment; source run_scripts/env_cpu.sh"),
        # verl takes it in capitals too.
        (
            "gpu",
            {"VERL_PLATFORM": " CPU"},
            "trainer.device=cuda: must be cpu, because the environment has VERL_PLATFORM=cpu",
        ),
        ("gpu", {}, "trainer.device=cuda: needs a GPU on this machine, or RAY_ADDRESS"),
    ],
)
def test_training_without_its_device_ends_in_a_line_before_ray(
    monkeypatch, no_device, resolved_config, tmp_path, platform, variables, line
):
    config = resolved_config("own_job", f"platform={platform}", f"trainer.default_local_dir={tmp_path}")
    monkeypatch.setattr(preflight, "foreign_recipe", lambda: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{line}"):
        main_ppo.run(config)


def test_devices_may_be_a_clusters(monkeypatch, no_device):
    assert command.no_device("cuda", None) is not None and command.no_device("cuda", "10.0.0.1:6379") is None
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert command.no_device("cuda", None) is None
