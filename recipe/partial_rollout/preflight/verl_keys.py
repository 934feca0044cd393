"""The keys of a command line and of its config: each is read by something, each value is of the type that verl declares.

verl does not check this. A word such as ``off`` is a string for it, and so true; text for a number fails in a worker; a
misspelt key of a config file, or one of an older verl, changes nothing. Types come from the dataclasses that verl makes
of its config, and else from the defaults in its files.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import ray
import verl
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.partial_rollout.config.keys import LISTED, ConfigError, declarations, fail, leaves, no_such
from recipe.partial_rollout.config.settings import CONF_DIR, ROOT, PartialRolloutConfig
from recipe.partial_rollout.waits import one_line

_VERSION = version("verl")
_VERL, _RECIPE = Path(verl.__file__).parent, Path(__file__).resolve().parents[1]
_TARGET = "_target_"
_OPEN = {
    "reward.custom_reward_function",
    "reward.reward_kwargs",
    "distillation.teacher_models",
    "actor_rollout_ref.rollout.custom",
}
"""nodes that take any key: what they hold is handed to code of the user's"""
_TYPES: dict[str, Any] = {
    "actor_rollout_ref.actor.clip_ratio_c": float | None,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": int | None,
    "data.gen_batch_size": int | None,
    "data.seed": int | None,
    "data.val_batch_size": int | None,
    "trainer.max_actor_ckpt_to_keep": int | None,
    "trainer.max_critic_ckpt_to_keep": int | None,
    "trainer.total_training_steps": int | None,
}
"""of keys that may be null, which verl's annotation does not say, or that are in no dataclass"""
_UNREAD = {
    "custom_reward_function": "reward.custom_reward_function",
    "sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.name",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model": "reward.reward_model",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    "actor_rollout_ref.actor.freeze_vision_tower": None,
    "actor_rollout_ref.nccl_timeout": None,
    "actor_rollout_ref.rollout.over_sample_rate": None,
    "actor_rollout_ref.rollout.multi_stage_wake_up": None,
    "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts": None,
    "data.reward_fn_key": None,
    "data.return_raw_input_ids": None,
    "data.sampler": None,
}
"""keys that verl 0.9.1 declares and does not read, and what it reads instead; of several that fit the first counts"""


def check_verl_keys(config: DictConfig) -> None:
    """Refuse values of another type than verl's, and keys that nothing reads.

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
    for path, value, allowed in sorted(found, key=lambda each: each[0] in copies):
        raise fail(path, value, allowed)


def null_section(config: DictConfig, error: Exception) -> ConfigError | None:
    """The first section that is null where verl has keys, if any: what a check that raised ``error`` was given.

    verl reads some as null, so it is no mistake in itself, and ``error`` is told too.
    """
    given: Any = OmegaConf.to_container(config)
    declared = OmegaConf.create(_declared())
    for path, value in leaves(given):
        if value is None and (default := OmegaConf.select(declared, path)) and OmegaConf.is_dict(default):
            return fail(path, None, f"{_section(path, default)} ({one_line(error)})")
    return None


@cache
def _declared(*, resolve: bool = True) -> dict[str, Any]:
    """verl's own defaults for FSDP, and Megatron's keys besides. Sections that others copy from come first."""
    folder = _VERL / "trainer" / "config"
    files = [OmegaConf.load(folder / f"_generated_ppo_{engine}trainer.yaml") for engine in ("megatron_", "")]
    merged: Any = OmegaConf.to_container(OmegaConf.unsafe_merge(*files), resolve=resolve)
    return {name: merged[name] for name in dict.fromkeys(("data", "trainer", *merged))}


def _mistakes(
    node: Mapping[Any, Any], known: Any, path: str = "", *, free: tuple[str, ...] = (), kind: Any = None
) -> Iterator[tuple[str, Any, str]]:
    """Key, value and what is allowed, for each mistake in ``node``.

    Args:
        known: verl's defaults of the node.
        path: of the node, with a dot at its end.
        free: what keys begin with that verl need not know.
        kind: its type, as annotated in the dataclass around it.
    """
    known = known if isinstance(known, Mapping) else {}
    hints = _hints(node.get(_TARGET) or kind)
    for name, value in node.items():
        at = f"{path}{name}"
        default = known.get(name)
        if at in _OPEN or name == _TARGET:
            continue
        if any(f"{at}.".startswith(f"{key}.") for key in _UNREAD):
            yield from _unread(leaves({at: value}), dict(leaves({at: default})))
            continue
        if at in _HANDED_ON and isinstance(value, Mapping):
            yield from _unknown(value, at)
            continue
        if not (
            at.startswith(free) or name in known or name in hints or not known | hints or _is_read(path, str(name))
        ):
            yield at, value, no_such(str(name), [*known, *hints], path, ", nothing reads it")
        if isinstance(default, Mapping) and not isinstance(value, Mapping | None):
            yield at, value, _section(at, default)
        elif isinstance(default, list) and not isinstance(value, list | None) and at != "trainer.logger":
            yield at, value, f"a list such as [{', '.join(map(str, default))}]"
        elif allowed := _refusal(value, _TYPES.get(at, hints.get(name)), default):
            yield at, value, allowed
        elif isinstance(value, Mapping):
            yield from _mistakes(value, default, f"{at}.", free=free, kind=hints.get(name))


def _unread(given: Iterable[tuple[str, Any]], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Those of ``given``, keys of ``_UNREAD``, that are other than verl's ``defaults``."""
    for path, value in given:
        default = defaults.get(path)
        if value not in (default, None, {}):
            old, new = next(pair for pair in _UNREAD.items() if f"{path}.".startswith(f"{pair[0]}."))
            reads = f"reads {new}{path.removeprefix(old)} instead" if new else "does not read it"
            yield path, value, f"{'null' if default is None else default}: verl {_VERSION} {reads}"


def _of_ray() -> set[str]:
    """Options of the installed ``ray.init``, some of which it hides in its keyword arguments."""
    hidden = re.findall(r'kwargs\.pop\(\s*"(\w+)"', inspect.getsource(ray.init))
    return {*inspect.signature(ray.init).parameters, *hidden} - {"kwargs"}


def _of_vllm() -> set[str]:
    """Options of the installed ``vllm serve``, to which verl hands them."""
    from vllm.entrypoints.openai.cli_args import create_parser_for_docs

    return {option.dest for option in create_parser_for_docs()._actions}


_HANDED_ON = {
    "ray_kwargs.ray_init": ("ray.init", _of_ray),
    "actor_rollout_ref.rollout.engine_kwargs.vllm": ("vLLM", _of_vllm),
}
"""nodes that are handed to a library, and what names its keys"""


def _unknown(node: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any, str]]:
    """Keys of ``node``, at a path of ``_HANDED_ON``, that its library does not have."""
    if not node or str(node.get("address")).startswith("ray://"):
        # Ray's client takes any.
        return
    taker, names_of = _HANDED_ON[path]
    names = names_of()
    for name, value in node.items():
        # vLLM takes a key for an option of its command line.
        if str(name).replace("-", "_").partition(".")[0] not in names:
            yield f"{path}.{name}", value, no_such(str(name), names, f"{path}.", f", {taker} has none")


def _section(path: str, default: Mapping[str, Any]) -> str:
    return f"a section of keys such as {path}.{next((name for name in default if name != _TARGET), 'KEY')}"


def _refusal(value: Any, hint: Any, default: Any) -> str | None:
    """What is allowed, if ``value`` is not; only flags and numbers are checked.

    Args:
        hint: as annotated in verl's dataclass, or in ``_TYPES``; None: there is none.
        default: in verl's files; it says the type where there is no hint.
    """
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint or type(default)}
    nullable = NoneType in kinds or default is None
    kinds -= {NoneType}
    if not kinds or not kinds <= {bool, int, float} or (value is None and nullable):
        return None
    good = type(value) in kinds or (float in kinds and type(value) is int)
    words = "true or false" if kinds == {bool} else "a number" if float in kinds else "an integer"
    if isinstance(value, str) and re.fullmatch(r"[-+\d.]+(e-?\d+)?", value):
        words += " (this is text; of a variable's text, ${oc.decode:${oc.env:NAME}} makes a number)"
    return None if good else words + (", or null" if nullable else "")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Annotations of a dataclass of verl's, of its name, or of what may be one; none of anything else."""
    if isinstance(kind, str):
        module, _, name = kind.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
    return next((get_type_hints(each) for each in (kind, *get_args(kind)) if is_dataclass(each)), {})


@cache
def _is_read(path: str, name: str) -> bool:
    """Whether code of verl or of the recipe takes key ``name`` from a config, or from the node at ``path``."""
    node = rf"(?:config|cfg|{re.escape(path.split('.')[-2])})\w*"
    quoted = rf"[\"']{re.escape(name)}[\"']"
    taken = re.compile(rf"{node}(?:\.get\(\s*|\[){quoted}|{node}\.{re.escape(name)}\b|getattr\({node}, {quoted}")
    return any(taken.search(file.read_text()) for root in (_VERL, _RECIPE) for file in root.rglob("*.py"))


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
    allowed = f"did you mean {near[0]}? " if near else ""
    return fail(group or "--config-name", choice, f"{allowed}one of {', '.join(options)}")


def expand_homes(config: DictConfig) -> None:
    """Write paths that begin with ``~/`` in full, in place: verl would look for them, or write, in a directory ``~``."""
    written: Any = OmegaConf.to_container(config)
    for path, value in leaves(written):
        parts = value if isinstance(value, list) else [value]
        full = [os.path.expanduser(each) if str(each).startswith("~/") else each for each in parts]
        if full != parts:
            OmegaConf.update(config, path, full if isinstance(value, list) else full[0])


def resolved(config: DictConfig) -> DictConfig:
    """A copy of ``config`` without interpolations.

    Raises:
        ConfigError: one of them has no value, such as that of a variable that is not set.
    """
    if not OmegaConf.is_dict(config._get_node(ROOT)):
        raise fail(ROOT, config[ROOT], f"a section of keys such as {ROOT}.enable")
    copy = config.copy()
    try:
        OmegaConf.resolve(copy)
    except OmegaConfBaseException as error:
        said = str(error).splitlines()[0]
        key, value = _unresolved(config, said)
        raise fail(key, value, said) from error
    return copy


def _unresolved(config: DictConfig, said: str) -> tuple[str, Any]:
    """The key, as it is written, that made OmegaConf say ``said``; others may copy it."""
    names = re.findall(r"['`]([\w.]+)['`]", said)
    written: Any = OmegaConf.to_container(config)
    texts = [(path, str(value)) for path, value in leaves(written) if "${" in str(value)]
    return max(texts, key=lambda each: any(name in each[1] for name in names))
