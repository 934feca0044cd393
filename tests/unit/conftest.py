"""Keyword builders for the pure parts: a prompt, an output, a manager with small sizes."""

import asyncio
import gc
import inspect
import io
import itertools
import json
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from omegaconf import OmegaConf, base
from ray._private import auto_init_hook

from recipe.partial_rollout.config.settings import Scheduling, SchedulingPolicy
from recipe.partial_rollout.manager import policies
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Prompt, SampleOutput, Segment
from tests.unit.shared import settings_of

# Tests resolve the same interpolations hundreds of times; parsing them takes most of it.
base.parse = cache(base.parse)


@cache
def loaded(text, load=OmegaConf.load):
    return pickle.dumps(load(io.StringIO(text)))


def load_once(file):
    """As ``OmegaConf.load``, which takes half of the time of composing a config."""
    return pickle.loads(loaded(file.read() if hasattr(file, "read") else Path(file).read_text()))


OmegaConf.load = staticmethod(load_once)

# How long an example takes says how busy the machine is, and is no fact of the code.
settings.register_profile("project", deadline=None)
settings.load_profile("project")


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(policies, "RETRY_AFTER_S", 0.005)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    """A question to Ray, which would start one, is an error."""
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", False)


@pytest.fixture
def no_garbage():
    """For tests that parse code: garbage of other tests that logs a traceback meanwhile makes CPython 3.11's ast.parse fail
    (gh-106905), because the traceback parses too."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def build_prompts(count, *, start=0):
    numbers = range(start, start + count)
    return [Prompt(f"0/{i}", {"index": i, "raw_prompt": [{"role": "user", "content": str(i)}]}) for i in numbers]


def build_segment(length=3):
    return Segment(np.arange(length, dtype=np.int32), np.full(length, -0.5, np.float32), 0)


def build_output(length=5, *, version=0, reward=1.0, prompt_length=4, info=None):
    return SampleOutput(
        prompt_ids=np.arange(1, prompt_length + 1, dtype=np.int32),
        response_ids=np.arange(10, 10 + length, dtype=np.int32),
        response_mask=np.ones(length, np.int8),
        log_probs=np.full(length, -0.5, np.float32),
        versions=np.full(length, version, np.int32),
        segments=1,
        reward_score=reward,
        reward_extra_info={"acc": reward} if info is None else info,
        num_turns=2,
        metrics={"generate_sequences": 0.1, "tool_calls": 0.0, "compute_score": 0.0},
        extra_fields={"turn_scores": []},
    )


def build_manager(
    *,
    batch=2,
    n=2,
    policy=SchedulingPolicy.BOUNDED,
    overtake=None,
    prompts=100,
    workers=1,
    capacity=64,
    put=tuple,
    **keys,
):
    clock = itertools.count()
    run = settings_of(batch, n, scheduling=Scheduling(policy, overtake), **keys)
    manager = PromptsManager(run, lambda: float(next(clock)), put=put)
    manager.backlog.enqueue(build_prompts(prompts))
    for i in range(workers):
        manager.slots.register(f"w{i}", capacity)
    return manager


@cache
def composed(name, groups):
    """Pickled: its copies are made twenty times as fast as by ``deepcopy``."""
    from hydra import compose, initialize_config_dir

    from recipe.partial_rollout.main_ppo import CONF_DIR

    with initialize_config_dir(str(CONF_DIR), version_base=None):
        return pickle.dumps(compose(name, overrides=list(groups)))


def build_config(name, *overrides):
    """A copy of config ``name`` with ``overrides``, as hydra's command line would compose it.

    Composing takes longer than anything that a test does with the result. Choices of whole files are composed, once a
    session; single keys are set on the copy.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    single = [
        each
        for each in parsed
        if "." in each.key_or_group and not each.key_or_group.startswith("hydra.") and not each.is_delete()
    ]
    config = pickle.loads(composed(name, tuple(each.input_line for each in parsed if each not in single)))
    for each in single:
        OmegaConf.update(config, each.key_or_group, each.value(), force_add=each.is_add())
    return config


@pytest.fixture(scope="session")
def composed_config():
    return build_config


@pytest.fixture(scope="session")
def resolved_config():
    """``composed_config`` whose interpolations are resolved."""

    def build(name, *overrides):
        config = build_config(name, *overrides)
        OmegaConf.resolve(config)
        return config

    return build


SIZES = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2"]
QWEN = {"model_type": "qwen3", "vocab_size": 10, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


@pytest.fixture
def configure(tmp_path, resolved_config):
    """``configure(*overrides, model=sizes)``: a config with a model of ``sizes`` and empty data files."""

    def build(*overrides, model=QWEN):
        (tmp_path / "config.json").write_text(json.dumps(model))
        for name in ("model.safetensors", "data.parquet"):
            (tmp_path / name).touch()
        files = [f"data.{split}_files={tmp_path}/data.parquet" for split in ("train", "val")]
        return resolved_config("quickstart_cpu", *SIZES, *files, f"actor_rollout_ref.model.path={tmp_path}", *overrides)

    return build


@pytest.fixture
def prompts():
    return build_prompts


@pytest.fixture
def segment():
    return build_segment


@pytest.fixture
def output():
    return build_output


@pytest.fixture
def manager():
    return build_manager


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test may be a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture
def engine(monkeypatch):
    """The scripted engine of ``loop_life`` in place of the replicas; it gives its ``answers`` in turn."""
    from tests.unit import loop_life
    from tests.unit.shared import script_replicas

    scripted = loop_life.Engine()
    script_replicas(monkeypatch, scripted.generate)
    return scripted
