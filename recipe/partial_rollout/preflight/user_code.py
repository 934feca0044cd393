"""Code and classes that a config names, tried once here as verl's workers will: loss, reward, dataset, tools, agent loops.

A worker would die of what does not load, a minute after the start, and its error would not name the key.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
from verl.tools.tool_registry import load_all_tools
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.import_utils import import_external_libs, resolve_config_path

from recipe.partial_rollout.config.keys import ConfigError, fail, refusing
from recipe.partial_rollout.config.settings import Correction, PartialRolloutConfig
from recipe.partial_rollout.manager.scheduling import order_of
from recipe.partial_rollout.preflight.rule import LOSS, at, broken, full, one_of, where
from recipe.partial_rollout.training.loss import config_of
from recipe.partial_rollout.waits import one_line

_TURNS = "actor_rollout_ref.rollout.multi_turn"
_LOOPS = "rollout.agent.agent_loop_config_path"
_REWARD, _MANAGER = "reward.custom_reward_function", "reward.reward_manager"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""what verl's reward managers give a reward function, by name"""
_MODEL, _MODEL_ARGUMENTS = "reward.reward_model.enable", ("reward_router_address", "reward_model_tokenizer")
"""what they give it besides, where there is a reward model"""
_MANAGERS_ARGUMENTS = ("config", "tokenizer", "compute_score", *_MODEL_ARGUMENTS)
"""what verl's reward workers give a reward manager, by name"""


def check_by_verl(config: DictConfig) -> None:
    """Let verl check the configuration before Ray starts. verl itself does so in a Ray actor and in its workers.

    Raises:
        ConfigError: in one line, with verl's words.
    """
    # A critic's node would load its model.
    nodes = ["rollout", "algorithm", *(["critic.optim", "critic.checkpoint"] if need_critic(config) else [])]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for node in nodes:
                omega_conf_to_dataclass(at(config, node))
            validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=False)
    except Exception as error:
        # hydra wraps what a dataclass raises; its cause is what verl says.
        raise ConfigError(f"verl refuses the configuration: {one_line(error.__cause__ or error)}") from error


def import_libraries(config: DictConfig) -> None:
    """Import the external libraries of the models, which may register estimators, losses and agent loops.

    Raises:
        ConfigError: one cannot be imported.
    """
    for key in ("model.external_lib", "critic.model.external_lib"):
        if at(config, key):
            _load(config, key, "a module that can be imported", lambda k=key: import_external_libs(at(config, k)))


def find_tools(config: DictConfig) -> None:
    """Load the tools that ``config`` names once: verl's workers would die of a tool that does not load.

    Raises:
        ConfigError: a file is missing, or its tools do not load.
    """
    paths = {name: at(config, f"{_TURNS}.{name}") for name in ("tool_config_path", "function_tool_path")}
    named = [name for name, path in paths.items() if path]
    if named:
        _load(config, f"{_TURNS}.{named[0]}", "a file whose tools verl can load", lambda: load_all_tools(**paths))


def check_code(config: DictConfig, settings: PartialRolloutConfig) -> Iterator[ConfigError]:
    """Load what ``config`` names: order, policy loss, reward, agent loops; yield an error for each name that is unknown.

    Raises:
        ConfigError: for the first that does not load, or lacks what is called.
    """
    order_of(settings.scheduling, settings.batch_groups)
    _check_loss(config, settings)
    _check_reward(config)
    if at(config, f"{_MANAGER}.source") == "importlib":
        _check_manager(config)
    # A loop's file and a tool's, which are loaded by now, may register others.
    named = (
        one_of("rollout.agent.default_agent_loop", agent_loops(config)),
        one_of("rollout.multi_turn.format", ToolParser._registry),
        one_of(f"{_MANAGER}.source", ("register", "importlib")),
        *where(f"{_MANAGER}.source=register", one_of(f"{_MANAGER}.name", REWARD_MANAGER)),
    )
    return broken(named, config)


def _load(config: DictConfig, key: str, words: str, load: Callable[[], Any]) -> Any:
    """Return what ``load`` returns; ``words`` say what the value of ``key`` must be."""
    # A BaseTool prints its schema.
    with refusing(full(key), at(config, key), words), contextlib.redirect_stdout(io.StringIO()):
        return load()


def _check_loss(config: DictConfig, settings: PartialRolloutConfig) -> None:
    """Refuse a policy loss that raises.

    In a run with a correction, also refuse one that halved behaviour weights do not change.
    """
    actor = config.actor_rollout_ref.actor
    whole, half = (
        _load(config, LOSS, "a loss that takes rollout_is_weights", partial(_loss_of, actor, weight))
        for weight in (1.0, 0.5)
    )
    corrects = settings.enable and settings.correction != Correction.NONE
    if corrects and abs(whole - half) <= 1e-3 * abs(whole):
        raise fail(
            full(LOSS),
            actor.policy_loss.loss_mode,
            "a loss that uses rollout_is_weights; this one ignores them (partial_rollout.correction=none allows it)",
        )


def _loss_of(actor: DictConfig, weight: float) -> float:
    """The policy loss of two made-up samples whose tokens all have this behaviour weight."""
    # clip_cov draws tokens at random: it must draw the same ones each time and leave the caller's generator alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        log_prob = -torch.rand(2, 8)
        loss, _ = POLICY_LOSS_REGISTRY[actor.policy_loss.loss_mode](
            old_log_prob=log_prob - 0.01 * torch.rand(2, 8),  # type: ignore[call-arg]
            log_prob=log_prob,
            advantages=torch.tensor([[1.0] * 8, [-1.0] * 8]),
            response_mask=torch.ones(2, 8),
            loss_agg_mode="token-mean",
            config=config_of(actor),
            rollout_is_weights=torch.full((2, 8), weight),
        )
    return float(loss)


def _check_reward(config: DictConfig) -> None:
    given = at(config, _REWARD) or {}
    if given.get("path"):
        words = f"a file with the function {given.get('name')} ({_REWARD}.name)"
        function = _load(config, f"{_REWARD}.path", words, lambda: get_custom_reward_fn(config)).args[0]
        arguments = (*_ARGUMENTS, *(_MODEL_ARGUMENTS if at(config, _MODEL) else ()))
        # Raises TypeError if a call as verl's managers make it would not fit.
        with refusing(f"{_REWARD}.name", given.get("name"), f"a function that takes {', '.join(arguments)}"):
            inspect.signature(function).bind(**dict.fromkeys(arguments) | dict(given.get("reward_kwargs") or {}))
            if inspect.isclass(function):
                raise TypeError("it is a class, and verl would take the object that it makes for the score")
            if inspect.iscoroutinefunction(type(function).__call__):
                raise TypeError("it is an object, and verl would not await its __call__")


def _check_manager(config: DictConfig) -> None:
    """Refuse a reward manager of the user's that does not load, or that verl's workers cannot make or call."""
    name = at(config, f"{_MANAGER}.name")
    words = f"a file with the class {name} ({_MANAGER}.name)"
    made: Any = _load(config, f"{_MANAGER}.module.path", words, lambda: resolve_reward_manager_cls(config))
    words = f"a class that takes {', '.join(_MANAGERS_ARGUMENTS)}, with a coroutine run_single(data)"
    with refusing(f"{_MANAGER}.name", name, words):
        inspect.signature(made).bind(**dict.fromkeys(_MANAGERS_ARGUMENTS))
        if inspect.isabstract(made) or not hasattr(made, "run_single"):
            raise TypeError("it has no run_single")


def agent_loops(config: DictConfig) -> set[str]:
    """Names of the agent loops that a worker would know.

    Raises:
        ConfigError: the file that names them, or one of them, does not load.
    """
    path = at(config, _LOOPS)
    words = "a YAML list of agent loops, each with its name and the _target_ of a class or function"
    with refusing(full(_LOOPS), path, words):
        listed: Any = OmegaConf.load(resolve_config_path(path)) if path else []
        named = {str(loop["name"]): get_object(loop["_target_"]) for loop in listed}
        if others := [name for name, made in named.items() if not callable(made)]:
            raise TypeError(f"the _target_ of {others[0]} is neither")
    # Their modules may have registered others.
    return {*named, *_agent_loop_registry}
