"""What hydra and OmegaConf say of a command line or a config file, in one line: the key, its value, what is allowed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.partial_rollout.config.keys import ConfigError, fail
from recipe.partial_rollout.config.settings import CONF_DIR, ROOT
from recipe.partial_rollout.preflight.verl_keys import leaves, nearest_key


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
    near = nearest_key(key)
    return fail(key, given, "no such key; " + (f"did you mean {near}?" if near else f"+{key}={given} adds it"))


def _of_missing(error: MissingConfigException) -> ConfigError:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = error.options or sorted(path.stem for path in CONF_DIR.glob("*.yaml") if "hydra:" in path.read_text())
    near = get_close_matches(choice, options, 1)
    allowed = f"did you mean {near[0]}? " if near else ""
    return fail(group or "--config-name", choice, f"{allowed}one of {', '.join(options)}")


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
    texts = [(path, str(value)) for path, value in leaves(OmegaConf.to_container(config)) if "${" in str(value)]
    return max(texts, key=lambda each: any(name in each[1] for name in names))
