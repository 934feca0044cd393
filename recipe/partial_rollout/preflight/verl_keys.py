"""Check verl's keys: no key is misspelt or of an older verl, and each value has the type that verl declares.

verl does not check this. It takes a word such as ``off`` for true; text for a number fails in a worker; a misspelt key of a
config file changes nothing. Types come from the dataclasses that verl makes of its config, or else from the defaults in its
files.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import verl
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
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
from recipe.partial_rollout.preflight.facts import full

_VERSION = version("verl")
_TARGET = "_target_"
_OPEN = {
    "reward.custom_reward_function",
    "reward.reward_kwargs",
    "distillation.teacher_models",
    "actor_rollout_ref.rollout.custom",
    "actor_rollout_ref.rollout.engine_kwargs",
    "ray_kwargs.ray_init",
}
"""nodes that take any key: code of the user's, the engine or Ray reads what they hold"""
_Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Share = Annotated[float, Meta(gt=0, le=1)]
_Unit = Annotated[float, Meta(ge=0, le=1)]
_NotNegative = Annotated[float, Meta(ge=0, le=FINITE)]
_Kl = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]
_Mean = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
_VALUES: dict[str, Any] = {
    "trainer.project_name": str,
    "trainer.experiment_name": str,
    "trainer.default_local_dir": str,
    "trainer.logger": str | list[str],
    "trainer.device": Literal["cpu", "cuda", "npu"],
    "trainer.nnodes": FromOne,
    "trainer.n_gpus_per_node": FromOne,
    "trainer.total_epochs": FromOne,
    "trainer.resume_mode": Literal["auto", "disable", "resume_path"],
    "data.train_files": str | list[str],
    "data.val_files": str | list[str],
    "data.train_batch_size": FromOne,
    "data.max_prompt_length": FromOne,
    "data.max_response_length": FromOne,
    "algorithm.gamma": _Unit,
    "algorithm.lam": _Unit,
    "algorithm.kl_penalty": _Kl,
    "algorithm.kl_ctrl.type": Literal["fixed", "adaptive"],
    "algorithm.kl_ctrl.horizon": FromOne,
    "algorithm.kl_ctrl.target_kl": Positive,
    "reward.num_workers": FromOne,
    "actor.strategy": Literal["fsdp", "fsdp2", "megatron"],
    "actor.ppo_epochs": FromOne,
    "actor.loss_agg_mode": _Mean,
    "actor.kl_loss_type": _Kl,
    "actor.optim.lr": _NotNegative,
    "actor.optim.lr_scheduler_type": Literal["constant", "cosine"],
    "rollout.mode": Literal["async"],
    "rollout.n": FromOne,
    "rollout.prompt_length": FromOne,
    "rollout.response_length": FromOne,
    "rollout.temperature": Positive,
    "rollout.top_p": _Share,
    "rollout.top_k": Annotated[int, Meta(ge=-1)],
    "rollout.val_kwargs.n": FromOne,
    "rollout.val_kwargs.temperature": _NotNegative,
    "rollout.val_kwargs.top_p": _Share,
    "rollout.val_kwargs.top_k": Annotated[int, Meta(ge=-1)],
    "rollout.agent.num_workers": FromOne,
    "rollout.tensor_model_parallel_size": FromOne,
    "rollout.data_parallel_size": FromOne,
    "rollout.pipeline_model_parallel_size": FromOne,
    "rollout.max_num_seqs": FromOne,
    "rollout.max_num_batched_tokens": FromOne,
    "rollout.gpu_memory_utilization": _Share,
    "rollout.scheduling_policy": Literal["fcfs", "priority"],
}
_OR_NULL: dict[str, Any] = {
    "trainer.total_training_steps": FromOne,
    "trainer.max_actor_ckpt_to_keep": int,
    "trainer.max_critic_ckpt_to_keep": int,
    "data.gen_batch_size": FromOne,
    "data.val_batch_size": FromOne,
    "data.dataloader_num_workers": Whole,
    "data.seed": _Seed,
    "actor.clip_ratio": _NotNegative,
    "actor.clip_ratio_low": _NotNegative,
    "actor.clip_ratio_high": _NotNegative,
    "actor.clip_ratio_c": float,
    # Adapters of scale 0 would train nothing.
    "model.lora_alpha": FromOne,
    "model.lora.alpha": FromOne,
    "rollout.seed": _Seed,
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": FromOne,
}
VALUES = {
    full(key): Key(default=None, words="", kind=kind, null="" if key in _OR_NULL else None)
    for key, kind in (_VALUES | _OR_NULL).items()
}
"""values of verl's keys that would silently train something else, or that everybody meets in the first hour"""
_MOVED = {
    "custom_reward_function": "reward.custom_reward_function",
    "sandbox_fusion": "reward.sandbox_fusion",
    "reward_model": "the keys of reward",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    "data.sampler": None,
}
"""keys that verl declares and no longer reads, and what it reads instead"""
_ALIKE = 0.77
"""similarity from which an unknown key is a misspelt one. ``save_frequency`` is (``save_freq``); ``data.filter_prompts``,
which verl reads without declaring it, is not"""


def check_verl_keys(config: DictConfig) -> None:
    """Refuse values of another type than verl's, and keys that are misspelt or moved.

    Args:
        config: resolved.

    Raises:
        ConfigError: for the first of them, in one line.
    """
    given: Any = OmegaConf.to_container(config)
    own_rows = OmegaConf.select(config, "data.custom_cls.path")
    sections = {name: given.get(name) for name in _declared()}
    found = list(_mistakes(sections, _declared(), free=("data.",) if own_rows else ()))
    # Many keys copy others. The one that the user has set is to be named.
    copies = {path for path, value in leaves(_declared(resolve=False)) if "${" in str(value)}
    for _, error in sorted(found, key=lambda each: each[0] in copies):
        raise error


@cache
def _declared(*, resolve: bool = True) -> dict[str, Any]:
    """verl's own defaults for FSDP, and Megatron's keys besides. Sections that others copy from come first."""
    folder = Path(verl.__file__).parent / "trainer" / "config"
    files = [OmegaConf.load(folder / f"_generated_ppo_{engine}trainer.yaml") for engine in ("megatron_", "")]
    merged: Any = OmegaConf.to_container(OmegaConf.unsafe_merge(*files), resolve=resolve)
    return {name: merged[name] for name in dict.fromkeys(("data", "trainer", *merged))}


def _mistakes(
    node: Mapping[Any, Any], known: Any, path: str = "", *, free: tuple[str, ...] = (), kind: Any = None
) -> Iterator[tuple[str, ConfigError]]:
    """Yield key and error of each mistake in ``node``.

    Args:
        known: verl's defaults of the node.
        path: of the node, with a dot at its end.
        free: beginnings of keys that the user's own code may read.
        kind: type of the node, as annotated in the dataclass around it.
    """
    known = known if isinstance(known, Mapping) else {}
    hints = _hints(node.get(_TARGET) or kind)
    names = {*known, *hints}
    for name, value in node.items():
        at = f"{path}{name}"
        default = known.get(name)
        if at in _OPEN or name == _TARGET:
            continue
        if at in _MOVED:
            yield from _moved(at, value, default)
            continue
        if name not in names and not at.startswith(free) and (near := get_close_matches(str(name), names, 1, _ALIKE)):
            yield at, fail(at, value, f"no such key; did you mean {path}{near[0]}?")
        if at in VALUES:
            try:
                checked(at, value, VALUES[at])
            except ConfigError as error:
                yield at, error
        elif words := _refusal(at, value, hints.get(name), default):
            yield at, fail(at, value, words)
        elif isinstance(value, Mapping):
            yield from _mistakes(value, default, f"{at}.", free=free, kind=hints.get(name))


def _moved(path: str, value: Any, default: Any) -> Iterator[tuple[str, ConfigError]]:
    """Yield a mistake for each key under ``path``, one of ``_MOVED``, whose value differs from verl's default."""
    defaults, reads = dict(leaves({path: default})), _MOVED[path]
    for key, given in leaves({path: value}):
        if given not in (default := defaults.get(key), None, {}):
            instead = f"reads {reads} instead" if reads else "does not read it"
            allowed = "null" if default is None else default
            yield key, fail(key, given, f"{allowed}: verl {_VERSION} {instead}")


def _section(path: str, default: Mapping[str, Any]) -> str:
    return f"a section of keys such as {path}.{next((name for name in default if name != _TARGET), 'KEY')}"


def _refusal(path: str, value: Any, hint: Any, default: Any) -> str | None:
    """Say what is allowed, if ``value`` is not; sections, lists, flags and numbers are checked.

    Args:
        hint: as annotated in verl's dataclass; None: there is none.
        default: in verl's files; it says the type where there is no hint.
    """
    if isinstance(default, Mapping):
        return None if isinstance(value, Mapping | None) else _section(path, default)
    if isinstance(default, list):
        return None if isinstance(value, list | None) else f"a list such as [{', '.join(map(str, default))}]"
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint or type(default)}
    nullable = NoneType in kinds or default is None
    kinds -= {NoneType}
    if not kinds or not kinds <= {bool, int, float} or (value is None and nullable):
        return None
    if type(value) in kinds or (float in kinds and type(value) is int):
        return None
    words = "true or false" if kinds == {bool} else "a number" if float in kinds else "an integer"
    return words + (", or null" if nullable else "")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Annotations of a dataclass of verl's, of its name, or of what may be one; none of anything else."""
    if isinstance(kind, str):
        module, _, name = kind.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
    return next((get_type_hints(each) for each in (kind, *get_args(kind)) if is_dataclass(each)), {})


# -- what hydra and OmegaConf say ----------------------------------------------------------------------------------------


def of_hydra(error: Exception, arguments: Sequence[str]) -> ConfigError:
    """What ``arguments``, a command line, did to make hydra raise ``error``."""
    if isinstance(error, MissingConfigException):
        return _of_missing(error)
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals:
            return ConfigError(f"{error.override}: an override, KEY=VALUE")
        return fail(
            key, value, f"hydra cannot read it; other than plain letters need quotes that reach it: \"{key}='{value}'\""
        )
    found = re.match(r"Could not override '([^']+)'", str(error))
    if not isinstance(error, HydraException) or found is None:
        return ConfigError(" ".join(str(error).split()))
    key = found[1]
    given = next((argument.partition("=")[2] for argument in arguments if argument.startswith(f"{key}=")), "")
    if key.startswith(f"{ROOT}."):
        names = [declared.name for declared in declarations(PartialRolloutConfig)]
        return fail(key, given, no_such(key.removeprefix(f"{ROOT}."), names, f"{ROOT}.", otherwise=LISTED))
    names = [path for path, _ in leaves(_declared())]
    return fail(key, given, no_such(key, names, "", otherwise=f"; +{key}={given} adds it"))


def _of_missing(error: MissingConfigException) -> ConfigError:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = error.options or sorted(
        path.stem for path in CONF_DIR.glob("*.yaml") if "- ppo_trainer" in path.read_text()
    )
    near = get_close_matches(choice, options, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    return fail(group or "--config-name", choice, f"{meant}one of {', '.join(options)}")


def expand_homes(config: DictConfig) -> None:
    """Write paths that begin with ``~/`` in full, in place: verl would look for them, or write, in a directory ``~``."""
    written: Any = OmegaConf.to_container(config)
    for path, value in leaves(written):
        parts = value if isinstance(value, list) else [value]
        written_out = [os.path.expanduser(each) if str(each).startswith("~/") else each for each in parts]
        if written_out != parts:
            OmegaConf.update(config, path, written_out if isinstance(value, list) else written_out[0])


def resolved(config: DictConfig) -> DictConfig:
    """Return a copy of ``config`` without interpolations.

    Raises:
        ConfigError: an interpolation has no value, such as that of a variable that is not set.
    """
    if not OmegaConf.is_dict(config._get_node(ROOT)):
        raise fail(ROOT, config[ROOT], f"a section of keys such as {ROOT}.enable")
    copy = config.copy()
    try:
        OmegaConf.resolve(copy)
    except OmegaConfBaseException as error:
        words = str(error).splitlines()[0]
        names = re.findall(r"['`]([\w.]+)['`]", words)
        written: Any = OmegaConf.to_container(config)
        texts = [(path, str(value)) for path, value in leaves(written) if "${" in str(value)]
        # Others may copy the key that has the interpolation.
        key, value = max(texts, key=lambda each: any(name in each[1] for name in names))
        raise fail(key, value, words) from error
    return copy
