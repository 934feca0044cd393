"""Checks of the whole configuration that read no file: verl's keys that partial rollout depends on."""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from recipe.partial_rollout.config.settings import PartialRolloutConfig, check_keys
from recipe.partial_rollout.preflight.inputs import (
    check_critic,
    check_engine,
    check_vocabulary,
    find_tools,
    missing_inputs,
    missing_packages,
    size_bucket,
)
from recipe.partial_rollout.preflight.rule import check_rules
from recipe.partial_rollout.preflight.rules import RULES, WARNINGS
from recipe.partial_rollout.preflight.user_code import check_by_verl, check_code, import_libraries
from recipe.partial_rollout.preflight.verl_keys import check_verl_keys


def check_config(config: DictConfig) -> PartialRolloutConfig:
    """Raise ``ConfigError`` for the first mistake in settings or inputs; returns the checked settings.

    Flags in ``config`` become bools, paths of tools absolute, and a bucket of the weight sync that is null gets its size.
    """
    settings = check_settings(config)
    find_tools(config)
    check_code(config)
    for error in (*missing_packages(config), *missing_inputs(config)):
        raise error
    check_vocabulary(config)
    check_engine(config)
    check_critic(config)
    size_bucket(config)
    return settings


def check_settings(config: DictConfig) -> PartialRolloutConfig:
    """Raise ``ConfigError`` for the first mistake found; returns the checked settings. Flags in ``config`` become bools."""
    check_keys(config)
    check_verl_keys(config)
    settings = PartialRolloutConfig.from_config(config)
    import_libraries(config)
    check_rules(RULES, config)
    for warning in filter(None, (rule.refusal(config) for rule in WARNINGS)):
        print(f"warning: {warning}", file=sys.stderr)
    check_by_verl(config)
    return settings
