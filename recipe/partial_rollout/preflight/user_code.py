"""Code and classes that a config names, loaded once here as verl's workers will: reward, dataset, agent loops, loggers.

A worker would die of what does not load, a minute after the start, and its error would not name the key.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Collection
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, _agent_loop_registry
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import get_dataset_class
from verl.utils.import_utils import import_external_libs, resolve_config_path
from verl.workers.config.optimizer import build_optimizer

from recipe.partial_rollout.config.keys import ConfigError, fail
from recipe.partial_rollout.waits import one_line

_AGENT = "actor_rollout_ref.rollout.agent"
_LOOPS = f"{_AGENT}.agent_loop_config_path"
_REWARD, _MANAGER = "reward.custom_reward_function", "reward.reward_manager"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""what verl's reward managers give a reward function, by name"""


def check_by_verl(config: DictConfig) -> None:
    """Let verl check the configuration, which it would once the engines have started.

    Raises:
        ConfigError: in one line, with verl's words.
    """
    nodes = ["actor_rollout_ref.rollout", "algorithm"]
    if need_critic(config):
        # Without its model, which this would load.
        nodes += ["critic.optim", "critic.checkpoint"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for node in nodes:
                omega_conf_to_dataclass(OmegaConf.select(config, node))
            validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=False)
    except Exception as error:
        # hydra wraps what a dataclass raises; its cause is what verl says.
        cause = error.__cause__ or error
        raise ConfigError(f"verl refuses the configuration: {one_line(cause)}") from error


def import_libraries(config: DictConfig) -> None:
    """Import the external libraries of the models, which may register estimators, losses and agent loops.

    Raises:
        ConfigError: one cannot be imported.
    """
    for library in ("actor_rollout_ref.model.external_lib", "critic.model.external_lib"):
        if module := OmegaConf.select(config, library):
            _load(library, module, "a module that can be imported", lambda m=module: import_external_libs(m))


def check_code(config: DictConfig) -> None:
    """Load what ``config`` names: reward, dataset, agent loops.

    Raises:
        ConfigError: for the first that does not load, or lacks what verl calls.
    """
    _check_reward(config)
    if path := OmegaConf.select(config, "data.custom_cls.path"):
        words = f"a file with the dataset class {config.data.custom_cls.name} (data.custom_cls.name)"
        _load("data.custom_cls.path", path, words, lambda: get_dataset_class(config.data))
    _check_loops(config)
    for node in ("actor_rollout_ref.actor", *(["critic"] if need_critic(config) else [])):
        optim = OmegaConf.select(config, f"{node}.optim")
        if implementation := optim.get("optimizer_impl"):
            words = f"a class of {implementation} (optimizer_impl) that takes what {node}.optim says"
            _load(f"{node}.optim.optimizer", optim.optimizer, words, lambda o=optim: _optimizer_of(o))


def _optimizer_of(optim: DictConfig) -> Any:
    return build_optimizer([torch.nn.Parameter(torch.zeros(1))], omega_conf_to_dataclass(optim))


def _load(key: str, value: Any, words: str, load: Callable[[], Any]) -> Any:
    """What ``load`` returns; ``words`` say what ``value`` must be."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return load()
    except Exception as error:
        raise fail(key, value, f"{words} ({one_line(error.__cause__ or error)})") from error


def _check_reward(config: DictConfig) -> None:
    given = OmegaConf.select(config, _REWARD) or {}
    if path := given.get("path"):
        words = f"a file with the function {given.get('name')} ({_REWARD}.name)"
        function = _load(f"{_REWARD}.path", path, words, lambda: get_custom_reward_fn(config))
        own = function.args[0]
        _load(
            f"{_REWARD}.name", given.get("name"), f"a function of {', '.join(_ARGUMENTS)}", lambda: _called(own, given)
        )
    manager = config.reward.reward_manager
    if manager.source == "register":
        from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

        _known(f"{_MANAGER}.name", manager.name, REWARD_MANAGER)
        return
    path = OmegaConf.select(manager, "module.path")
    words = f"a file with the class {manager.name} ({_MANAGER}.name)"
    kind = _load(f"{_MANAGER}.module.path", path, words, lambda: resolve_reward_manager_cls(config))
    _needs(f"{_MANAGER}.name", manager.name, kind, RewardManagerBase)


def _called(function: Callable[..., Any], given: Any) -> None:
    """Raise TypeError if a call as verl's managers make it would not fit ``function``."""
    inspect.signature(function).bind(**{**dict.fromkeys(_ARGUMENTS), **(given.get("reward_kwargs") or {})})


def agent_loops(config: DictConfig) -> set[str]:
    """Names of the agent loops that a worker would know.

    Raises:
        ConfigError: the file that names them, or one of them, does not load.
    """
    path = OmegaConf.select(config, _LOOPS)
    if not path:
        return set(_agent_loop_registry)
    listed = _load(_LOOPS, path, "a YAML list of agent loops", lambda: OmegaConf.load(resolve_config_path(str(path))))
    if not OmegaConf.is_list(listed):
        raise fail(_LOOPS, path, "a YAML list of agent loops, each with name and _target_")
    for loop in listed:
        name, target = (loop.get(key) if OmegaConf.is_dict(loop) else None for key in ("name", "_target_"))
        if not (name and target):
            raise fail(_LOOPS, path, "a YAML list of agent loops, each with name and _target_")
        kind = _load(_LOOPS, path, f"loops that load; {name} does not", lambda t=target: get_class(t))
        _needs(_LOOPS, path, kind, AgentLoopBase)
    return {*_agent_loop_registry, *(str(loop.name) for loop in listed)}


def _check_loops(config: DictConfig) -> None:
    """Check the names of loop and tool format; a loop's file and a tool's, which are loaded by now, may register others."""
    rollout = config.actor_rollout_ref.rollout
    _known(f"{_AGENT}.default_agent_loop", rollout.agent.default_agent_loop, agent_loops(config))
    _known("actor_rollout_ref.rollout.multi_turn.format", rollout.multi_turn.format, ToolParser._registry)


def _known(key: str, name: Any, names: Collection[str]) -> None:
    if name not in names:
        raise fail(key, name, "one of " + ", ".join(sorted(names)))


def _needs(key: str, value: Any, kind: type, base: type) -> None:
    """Refuse a class without the methods that ``base`` leaves to it, or with one that is not a coroutine as there."""
    for name in sorted(base.__abstractmethods__):
        own = getattr(kind, name, None)
        if own is None or getattr(own, "__isabstractmethod__", False):
            raise fail(key, value, f"a class with verl's method {name}; {kind.__name__} lacks it")
        if inspect.iscoroutinefunction(getattr(base, name)) and not inspect.iscoroutinefunction(own):
            raise fail(key, value, f"a class whose method {name} is async; {kind.__name__}'s is not")
