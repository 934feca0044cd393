"""Checks of the whole configuration that read no file: verl's keys that partial rollout depends on."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, RolloutReplica

from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.config.settings import PartialRolloutConfig, check_keys
from recipe.partial_rollout.preflight.inputs import (
    check_critic,
    check_vocabulary,
    find_tools,
    missing_inputs,
    missing_packages,
    size_bucket,
)
from recipe.partial_rollout.preflight.placement_check import check_placement
from recipe.partial_rollout.preflight.pr_rules import PR_RULES
from recipe.partial_rollout.preflight.rule import check_rules
from recipe.partial_rollout.preflight.rules import RULES
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
    _check_checkpoints(config)
    if settings.enable:
        check_rules(PR_RULES, config)
        _check_slots(config, settings)
        check_placement(config, settings)
        _warn_of_lost_prompts(config)
    check_by_verl(config)
    return settings


def _warn_of_lost_prompts(config: DictConfig) -> None:
    if not config.partial_rollout.drain and config.trainer.save_freq <= 0:
        print(
            "warning: partial_rollout.drain=False with trainer.save_freq=-1: "
            "no checkpoint keeps what is in flight at the end",
            file=sys.stderr,
        )


def _check_slots(config: DictConfig, settings: PartialRolloutConfig) -> None:
    """Leave the server's actor calls for its control: an interruption that queues behind samples comes when they end."""
    server: Any = RolloutReplica.max_concurrency
    calls = server.fget(SimpleNamespace(config=config.actor_rollout_ref.rollout))
    most = calls - CONTROL_METHOD_CONCURRENCY
    if settings.slots_per_replica > most:
        raise fail(
            "partial_rollout.slots_per_replica",
            settings.slots_per_replica,
            f"at most {most}: verl's server takes {calls} calls at once, {CONTROL_METHOD_CONCURRENCY} of them for control "
            f"(more with a larger actor_rollout_ref.rollout.max_num_seqs)",
        )


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _check_checkpoints(config: DictConfig) -> None:
    trainer, mode = config.trainer, config.trainer.resume_mode
    if mode not in ("auto", "resume_path", "disable"):
        raise fail("trainer.resume_mode", mode, "one of auto, resume_path, disable")
    path = trainer.get("resume_from_path")
    named = path and re.fullmatch(r"global_step_\d+", Path(str(path)).name)
    if mode == "resume_path" and not (named and Path(str(path)).is_dir()):
        raise fail(
            "trainer.resume_from_path", path, "an existing .../global_step_K with trainer.resume_mode=resume_path"
        )
    if trainer.get("default_hdfs_dir"):
        raise fail("trainer.default_hdfs_dir", trainer.default_hdfs_dir, "null: checkpoints are saved locally only")
    for part in ("actor_rollout_ref.actor", "critic"):
        if OmegaConf.select(config, f"{part}.checkpoint.async_save"):
            raise fail(f"{part}.checkpoint.async_save", True, "False: a checkpoint is sealed when it is whole")
