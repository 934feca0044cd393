"""Check verl's keys: no key is misspelt or of an older verl, and each value has the right type.

verl does not check this. It takes a word such as ``off`` for true. Text in place of a number fails in a worker. A
misspelt key in a config file changes nothing. ``VALUES`` has the types of some keys. Any other key must have the type
of verl's default, if that is a flag, a number, a list or a section.
"""

# Pyright does not let an alias of Annotated be joined with None in an expression; Python does.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import verl
from hydra.errors import OverrideParseException
from hydra.utils import get_class
from msgspec import Meta
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.partial_rollout.config.keys import (
    FINITE,
    LISTED,
    ConfigError,
    FromOne,
    Key,
    Positive,
    Whole,
    checked,
    declarations,
    fail,
    leaves,
    no_such,
)
from recipe.partial_rollout.config.settings import CONF_DIR, ROOT, PartialRolloutConfig

_TARGET = "_target_"
_OPEN = {
    "reward.custom_reward_function",
    "reward.reward_kwargs",
    "distillation.teacher_models",
    "actor_rollout_ref.rollout.custom",
    "actor_rollout_ref.rollout.engine_kwargs",
    "ray_kwargs.ray_init",
}
"""sections in which every key is allowed, because the user's code, the engine or Ray reads them"""
_Share = Annotated[float, Meta(ge=0, le=1)]
_NotNegative = Annotated[float, Meta(ge=0, le=FINITE)]
VALUES: dict[str, Any] = {
    "trainer.project_name": str,
    "trainer.experiment_name": str,
    "trainer.default_local_dir": str,
    "trainer.logger": str | list[str],
    "trainer.device": Literal["cpu", "cuda", "npu"],
    "trainer.nnodes": FromOne,
    "trainer.n_gpus_per_node": FromOne,
    "trainer.total_epochs": FromOne,
    "trainer.total_training_steps": FromOne | None,
    "trainer.save_freq": int,
    "trainer.test_freq": int,
    "trainer.max_actor_ckpt_to_keep": int | None,
    "trainer.max_critic_ckpt_to_keep": int | None,
    "trainer.resume_mode": Literal["auto", "disable", "resume_path"],
    "data.train_files": str | list[str],
    "data.val_files": str | list[str],
    "data.train_batch_size": FromOne,
    "data.gen_batch_size": FromOne | None,
    "data.val_batch_size": FromOne | None,
    "data.max_prompt_length": FromOne,
    "data.max_response_length": FromOne,
    "data.train_max_samples": int,
    "data.val_max_samples": int,
    "data.dataloader_num_workers": Whole | None,
    "data.seed": int | None,
    "algorithm.gamma": _Share,
    "algorithm.lam": _Share,
    "algorithm.kl_ctrl.type": Literal["fixed", "adaptive"],
    "algorithm.kl_ctrl.horizon": FromOne,
    "algorithm.kl_ctrl.target_kl": Positive,
    # A cap, or two bounds such as 0.5_2.0.
    "algorithm.rollout_correction.rollout_is_threshold": float | str | None,
    "reward.num_workers": FromOne,
    "actor_rollout_ref.actor.strategy": Literal["fsdp", "fsdp2", "megatron"],
    "actor_rollout_ref.actor.ppo_epochs": FromOne,
    "actor_rollout_ref.actor.clip_ratio": _NotNegative | None,
    "actor_rollout_ref.actor.clip_ratio_low": _NotNegative | None,
    "actor_rollout_ref.actor.clip_ratio_high": _NotNegative | None,
    "actor_rollout_ref.actor.clip_ratio_c": float | None,
    "actor_rollout_ref.actor.optim.lr": _NotNegative,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": Literal["constant", "cosine"],
    # Adapters of scale 0 would train nothing.
    "actor_rollout_ref.model.lora_alpha": FromOne | None,
    "actor_rollout_ref.model.lora.alpha": FromOne | None,
    "actor_rollout_ref.rollout.mode": Literal["async"],
    "actor_rollout_ref.rollout.n": FromOne,
    "actor_rollout_ref.rollout.seed": int,
    "actor_rollout_ref.rollout.prompt_length": FromOne,
    "actor_rollout_ref.rollout.response_length": FromOne,
    "actor_rollout_ref.rollout.temperature": Positive,
    "actor_rollout_ref.rollout.top_k": Annotated[int, Meta(ge=-1)],
    "actor_rollout_ref.rollout.val_kwargs.n": FromOne,
    "actor_rollout_ref.rollout.val_kwargs.temperature": _NotNegative,
    "actor_rollout_ref.rollout.val_kwargs.top_k": Annotated[int, Meta(ge=-1)],
    "actor_rollout_ref.rollout.agent.num_workers": FromOne,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": FromOne,
    "actor_rollout_ref.rollout.data_parallel_size": FromOne,
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": FromOne,
    "actor_rollout_ref.rollout.max_num_seqs": FromOne,
    "actor_rollout_ref.rollout.max_num_batched_tokens": FromOne,
    "actor_rollout_ref.rollout.scheduling_policy": Literal["fcfs", "priority"],
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": FromOne | None,
}
"""types of verl's keys whose wrong values would silently train something else, or that everybody meets in the first
hour"""
_MOVED = {
    "custom_reward_function": "reads reward.custom_reward_function instead",
    "sandbox_fusion": "reads reward.sandbox_fusion instead",
    "reward_model": "reads the keys of reward instead",
    "actor_rollout_ref.actor.grad_clip": "reads actor_rollout_ref.actor.optim.clip_grad instead",
    "critic.grad_clip": "reads critic.optim.clip_grad instead",
    "data.sampler": "does not read it",
    "algorithm.rollout_correction.rollout_token_veto_threshold": (
        "reads algorithm.rollout_correction.rollout_rs instead"
    ),
    "actor_rollout_ref.actor.freeze_vision_tower": "does not read it",
    "actor_rollout_ref.actor.qat.enable": "reads that of actor_rollout_ref.actor.fsdp_config or .megatron instead",
    "actor_rollout_ref.actor.use_rollout_log_probs": "does not read it",
    "actor_rollout_ref.rollout.do_sample": "does not read it",
    "actor_rollout_ref.rollout.over_sample_rate": "does not read it",
    "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts": "reads actor_rollout_ref.rollout.n instead",
    "actor_rollout_ref.rollout.repetition_penalty": "samples with 1.0 whatever it says",
}
"""keys that verl does not read, or no longer, each with the end of its error message"""
_UNREAD = {
    "data.reward_fn_key": "reads the column data_source alone",
    "data.tokenizer": "reads actor_rollout_ref.model.tokenizer_path instead",
    "data.truncation": "cuts no prompt; data.filter_overlong_prompts leaves out rows that are too long",
}
"""like ``_MOVED``, but a user's own dataset class may read these keys"""
_ALIKE = 0.77
"""least similarity (``difflib``'s) to a known key that makes an unknown one a misspelling: ``save_frequency`` is one,
of ``save_freq``; ``data.filter_prompts``, which verl reads without declaring it, is none"""


def check_verl_keys(config: DictConfig) -> None:
    """Refuse values of a wrong type or range, misspelt keys, and keys that verl no longer reads.

    A key is misspelt if verl does not declare it and it resembles a key that verl declares. Other unknown keys pass. A
    key that verl does not read (``_MOVED``, ``_UNREAD``) may keep its default.

    Args:
        config: resolved.

    Raises:
        ConfigError: for the first mistake, in one line.
    """
    given: Any = OmegaConf.to_container(config)
    # data and trainer come first: many other keys copy theirs, and the error must name the key that the user has set.
    sections = {name: given.get(name) for name in ("data", "trainer", *_declared())}
    _check(sections, _declared(), free="data." if OmegaConf.select(config, "data.custom_cls.path") else None)


@cache
def _declared() -> dict[str, Any]:
    """Return verl's default config for FSDP, with the keys added that only its config for Megatron has."""
    folder = Path(verl.__file__).parent / "trainer" / "config"
    files = [OmegaConf.load(folder / f"_generated_ppo_{engine}trainer.yaml") for engine in ("megatron_", "")]
    merged: Any = OmegaConf.to_container(OmegaConf.unsafe_merge(*files), resolve=True)
    return merged


def default_of(key: str) -> Any:
    """Return verl's default of ``key``, which is written in full; None if verl does not declare it."""
    node: Any = _declared()
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _check(node: Mapping[Any, Any], known: Any, path: str = "", *, free: str | None = None) -> None:
    """Refuse the first mistake in ``node``.

    Args:
        known: verl's defaults of the node.
        path: path of the node in the config, with a dot at its end.
        free: prefix of keys, such as ``data.``, that may be unknown because the user's own code may read them; None: no
        key.
    """
    known = known if isinstance(known, Mapping) else {}
    known = {**(_fields(node[_TARGET]) if _TARGET in node else {}), **known}
    for name, value in node.items():
        at, default = f"{path}{name}", known.get(name)
        if at in _OPEN or name == _TARGET:
            continue
        own = free and at.startswith(free)
        if why := _MOVED.get(at) or (not own and _UNREAD.get(at)):
            if value not in (default, None, {}):
                words = f"must stay at verl's default, {default}, because verl {verl.__version__} {why}"
                raise fail(at, value, words)
            continue
        if name not in known and not own and (near := get_close_matches(str(name), known, 1, _ALIKE)):
            raise fail(at, value, f"no such key; did you mean {path}{near[0]}?")
        if kind := VALUES.get(at) or _number(default):
            checked(at, value, Key(default=None, words="", kind=kind))
        elif isinstance(default, Mapping | list) and not isinstance(value, type(default) | None):
            raise fail(at, value, "a list" if isinstance(default, list) else "a section of keys")
        elif isinstance(value, Mapping):
            _check(value, default, f"{at}.", free=free)


def _fields(target: str) -> dict[str, Any]:
    """Fields of verl's dataclass ``target`` with their defaults; its file of defaults may lack some of them."""
    return {field.name: None if field.default is MISSING else field.default for field in fields(get_class(target))}


def _number(default: Any) -> Any:
    """Return ``bool`` for a flag as default, ``float | None`` for a number (verl takes null for most), else None."""
    if isinstance(default, bool):
        return bool
    return float | None if isinstance(default, int | float) else None


# -- what hydra and OmegaConf say ----------------------------------------------------------------------------------------


def of_hydra(error: Exception) -> ConfigError:
    """Turn ``error`` of hydra into a ``ConfigError`` of one line; for an unknown key, say which one may be meant."""
    found = re.match(r"Could not override '([^']+)'\.\s+To append to your config use \+\1=(.*)", str(error))
    if found is None:
        words, argument = " ".join(str(error).split()), getattr(error, "override", "")
        # Some errors of hydra's parser do not quote the argument.
        words = words if argument in words else f"{argument}: {words}"
        quotes = """; a value with spaces or signs needs quotes of its own: 'KEY="VALUE"'"""
        return ConfigError(words + quotes * isinstance(error, OverrideParseException))
    key, given = found.groups()
    ours = [f"{ROOT}.{declared.name}" for declared in declarations(PartialRolloutConfig)]
    names = ours if key.startswith(f"{ROOT}.") else [path for path, _ in leaves(_declared())]
    otherwise = LISTED if names is ours else f"; if your code reads it, add it with +{key}={given}"
    return fail(key, given, no_such(key, names, "", otherwise))


def resolved(config: DictConfig) -> DictConfig:
    """Return a copy of ``config`` without interpolations.

    Raises:
        ConfigError: an interpolation has no value, such as that of a variable that is not set.
    """
    copy = config.copy()
    try:
        OmegaConf.resolve(copy)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return copy


_PATHS = re.compile(r"(^|_)(path|dir|files?)$")
"""finds the names of keys that hold paths, such as ``tool_config_path``"""
_WRITTEN = (
    "default_local_dir",
    "rollout_data_dir",
    "validation_data_dir",
    "dump_dir",
    "save_path",
    "timeline_json_file",
)
"""names of keys with paths that a run writes. Values of other keys are made absolute only if the file exists: they may
also name a model of the hub, a class or a file of verl's."""


def write_in_full(config: DictConfig) -> None:
    """Make the paths in the resolved ``config`` absolute in place, and replace ``~/`` at the beginning of any text.

    A process of Ray has the working directory in which the cluster was started, which need not be the user's.
    ``trainer.logger`` becomes a list of verl's present names.
    """
    values: Any = OmegaConf.to_container(config)
    for key, value in leaves(values):
        name, given = key.rpartition(".")[2], value if isinstance(value, list) else [value]
        full = [_in_full(each, name) if isinstance(each, str) else each for each in given]
        if full != given:
            OmegaConf.update(config, key, full if isinstance(value, list) else full[0])
    # In text, "wandb" would be found within "vemlp_wandb". "tracking" is verl's old name of wandb.
    loggers = [config.trainer.logger] if isinstance(config.trainer.logger, str) else config.trainer.logger
    config.trainer.logger = ["wandb" if each == "tracking" else each for each in loggers]


def _in_full(path: str, name: str) -> str:
    if path == "~" or path.startswith("~/"):
        return os.path.expanduser(path)
    if not path or "://" in path or not (_PATHS.search(name) or name in _WRITTEN):
        return path
    # A file of the recipe's, such as conf/tools/calculator.yaml, is found from any directory; other files are not.
    ours = CONF_DIR.parent / path
    if path.startswith(f"{CONF_DIR.name}/") and ours.is_file() and not os.path.exists(path):
        return str(ours)
    return os.path.abspath(path) if name in _WRITTEN or os.path.exists(path) else path
