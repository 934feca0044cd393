"""Checks of the whole configuration, in their order."""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.preflight.inputs import check_model, missing_inputs, missing_packages
from recipe.partial_rollout.preflight.rule import check_rules
from recipe.partial_rollout.preflight.rules import RULES, WARNINGS
from recipe.partial_rollout.preflight.user_code import check_by_verl, check_code, find_tools, import_libraries
from recipe.partial_rollout.preflight.verl_keys import check_verl_keys


def check_settings(config: DictConfig) -> PartialRolloutConfig:
    """Raise ``ConfigError`` for the first mistake in keys or the code that they name; returns the checked settings.

    Flags in ``config`` become bools, and paths of tools absolute.
    """
    check_verl_keys(config)
    settings = PartialRolloutConfig.from_config(config)
    import_libraries(config)
    check_rules(RULES, config)
    for warning in filter(None, (rule.refusal(config) for rule in WARNINGS)):
        print(f"warning: {warning}", file=sys.stderr)
    check_by_verl(config)
    find_tools(config)
    check_code(config)
    return settings


def check_config(config: DictConfig) -> PartialRolloutConfig:
    """``check_settings``, and nothing may be missing; a bucket of the weight sync that is null gets its size."""
    settings = check_settings(config)
    for error in (*missing_packages(config), *missing_inputs(config)):
        raise error
    check_model(config)
    return settings
