"""Checks of the whole configuration, in their order."""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from recipe.partial_rollout.config.settings import Correction, PartialRolloutConfig, Placement
from recipe.partial_rollout.preflight.inputs import check_model, missing_inputs, missing_packages
from recipe.partial_rollout.preflight.rule import When, check_rules, least, on, only, other_than, where
from recipe.partial_rollout.preflight.rules import RULES
from recipe.partial_rollout.preflight.user_code import check_by_verl, check_code, find_tools, import_libraries
from recipe.partial_rollout.preflight.verl_keys import check_verl_keys

_PR = on("partial_rollout.enable")
WARNINGS = (
    *where(
        _PR,
        other_than(
            "partial_rollout.correction",
            Correction.NONE,
            "samples that span policy versions train without behaviour weights",
        ),
    ),
    *where(
        on("partial_rollout.placement", Placement.SEPARATE),
        least(
            "partial_rollout.overlap",
            1,
            "fewer than N groups are in flight while the trainer holds N, so it waits for them",
        ),
    ),
    *where(
        When(lambda c: _PR.applies(c) and c.trainer.save_freq <= 0, "with trainer.save_freq=-1"),
        only("partial_rollout.drain", True, "no checkpoint keeps what is in flight at the end"),
    ),
)
"""rules of runs that start all the same"""


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
