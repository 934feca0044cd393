"""Compare the data, model and sizes of a run with those of the checkpoint that it resumes.

A checkpoint's manifest holds these facts by key of the config. A fact that differs is refused in one line with both
values.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic

from recipe.partial_rollout.checkpoint.manifest import CheckpointError
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints, claim_retention
from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.config.settings import trainer_devices
from recipe.partial_rollout.preflight.inputs import MODEL
from recipe.partial_rollout.records.run_log import METRICS

_FILE = "VERL_FILE_LOGGER_PATH"
"""variable of verl's file logger"""
_ROWS = "data.train_files"
_ALIKE = (
    "partial_rollout.enable",
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "data.shuffle",
    "data.seed",
    "data.dataloader_num_workers",
    "actor_rollout_ref.actor.strategy",
)
_TRAINERS = "trainer.nnodes * trainer.n_gpus_per_node"
_LOADED = MODEL, "actor_rollout_ref.actor.strategy", _TRAINERS
"""facts that must be the same even for a run that only validates (``trainer.val_only``)"""
_GROWING = {
    "partial_rollout.max_staleness": "groups in flight could not be trained in time",
    "data.max_prompt_length": "a prompt in flight may be longer",
    "data.max_response_length": "a sample in flight may be longer",
    "actor_rollout_ref.rollout.prompt_length": "a prompt in flight may be longer",
    "actor_rollout_ref.rollout.response_length": "a sample in flight may be longer",
    "algorithm.filter_groups.enable": "the checkpoint has consumed more prompts than it has trained",
}
"""keys that a resume under PR may raise (a flag: switch on) but not lower, each with the reason"""
_BROUGHT_BACK = "lr", "betas", "weight_decay", "override_optimizer_config"
"""keys of ``optim`` whose values FSDP takes from the checkpoint; the type of the schedule and ``clip_grad`` are the
config's"""
_WHY = _GROWING | {_TRAINERS: "the checkpoint has a shard for each of that many trainer devices"}


def check_checkpoints(config: DictConfig) -> RunCheckpoints:
    """Choose the checkpoint to resume, compare the run's facts with it, and return the run's checkpoints.

    ``made_of`` of the result has these facts. ``check_made_of_rows`` adds the rows, once they are loaded.

    Raises:
        ConfigError: the checkpoint that ``trainer.resume_mode`` asks for cannot be resumed, or not with these settings;
            or a variable has verl write the metrics elsewhere.
    """
    trainer, run_dir = config.trainer, Path(config.trainer.default_local_dir)
    given, own = os.environ.get(_FILE), run_dir / METRICS
    if given and not trainer.get("val_only") and Path(given).resolve() != own.resolve():
        raise fail(_FILE, given, f"unset, or {own}: a resume, and each tool, looks for the metrics there")
    # It removes the keys of retention. They stay in the config that is saved with the run, so it gets a copy.
    keep = claim_retention(trainer.copy(), critic=need_critic(config))
    try:
        checkpoints = RunCheckpoints(run_dir, trainer.resume_mode, trainer.get("resume_from_path"), keep)
    except CheckpointError as error:
        raise fail("trainer.resume_mode", trainer.resume_mode, str(error)) from error
    if checkpoints.chosen is None and (unused := trainer.get("resume_from_path")):
        allowed = "null, or with trainer.resume_mode=resume_path; else the training would start from scratch"
        raise fail("trainer.resume_from_path", unused, allowed)
    if checkpoints.chosen and need_critic(config) and not (checkpoints.chosen / "critic").is_dir():
        key = "critic.enable" if config.critic.enable else "algorithm.adv_estimator"
        allowed = (
            f"one without a critic, as in {checkpoints.chosen}; trainer.resume_mode=disable starts the training over"
        )
        raise fail(key, OmegaConf.select(config, key), allowed)
    checkpoints.made_of = _made_of(config)
    for key in _LOADED if trainer.get("val_only") else checkpoints.made_of:
        part, _, of_optimizer = key.partition(".optim.")
        loaded = f"{part}.checkpoint.load_contents"
        if not of_optimizer:
            _compare(key, checkpoints)
        elif {"optimizer", "extra"} & {*(OmegaConf.select(config, loaded) or ["optimizer"])}:
            why = f"verl trains with the checkpoint's value; {loaded}=[model] starts the optimizer anew with yours"
            _compare(key, checkpoints, why)
    return checkpoints


def check_made_of_rows(config: DictConfig, checkpoints: RunCheckpoints, dataset: Sequence[Any]) -> None:
    """Add the identity of the training rows to the run's facts, and compare it with the checkpoint to resume.

    Raises:
        ConfigError: the checkpoint is of other rows.
    """
    checkpoints.made_of[_ROWS] = rows_identity(dataset)
    if not config.trainer.get("val_only"):
        _compare(_ROWS, checkpoints, _why_other_rows(config, checkpoints))


def _why_other_rows(config: DictConfig, checkpoints: RunCheckpoints) -> str:
    """Say that the cap of prompts has changed, and with it the rows that fit; under noPR a checkpoint has no cap."""
    cap, here = "data.max_prompt_length", config.data.max_prompt_length
    saved = checkpoints.resumed.made_of.get(cap, here) if checkpoints.resumed else here
    if here == saved or not config.data.filter_overlong_prompts:
        return ""
    return f"{cap} is {here} and was {saved}, so that other rows fit, or the files differ"


def _compare(key: str, checkpoints: RunCheckpoints, why: str = "") -> None:
    here, saved = checkpoints.made_of[key], checkpoints.resumed.made_of if checkpoints.resumed else {}
    if key not in saved or here == saved[key] or (key in _GROWING and here > saved[key]):
        return
    bound = "must be at least " if key in _GROWING and not isinstance(here, bool) else "must be "
    why = f": {why}" if (why := why or _WHY.get(key, "")) else ""
    words = (
        f"{bound}{saved[key]}, as in {checkpoints.chosen}{why}; trainer.resume_mode=disable starts the training over"
    )
    raise fail(key, here, words)


def _made_of(config: DictConfig) -> dict[str, Any]:
    facts = {key: OmegaConf.select(config, key) for key in _ALIKE}
    if config.partial_rollout.enable:
        facts |= {key: OmegaConf.select(config, key, default=False) for key in _GROWING}
    # FSDP's shards belong to a number of trainers, on whichever nodes; Megatron's do not.
    facts[_TRAINERS] = None if config.actor_rollout_ref.actor.strategy == "megatron" else trainer_devices(config)
    for part in ("actor_rollout_ref.actor", *(["critic"] if need_critic(config) else [])):
        if OmegaConf.select(config, f"{part}.strategy") != "megatron":
            optim: Any = OmegaConf.to_container(OmegaConf.select(config, f"{part}.optim"))
            facts |= {f"{part}.optim.{name}": optim.get(name) for name in _BROUGHT_BACK}
    # The name alone: a model may be moved, or be of the hub on one machine and a copy on another.
    return facts | {MODEL: Path(str(config.actor_rollout_ref.model.path)).name}


def rows_identity(dataset: Sequence[Any]) -> str:
    """Number and hash of the rows in their order; only the number for a dataset class that keeps no table.

    A hundred thousand rows take two seconds.
    """
    frame = getattr(dataset, "dataframe", None)
    if frame is None or not hasattr(frame, "with_format"):
        return f"{len(dataset)} rows"
    digest = hashlib.blake2b(digest_size=6)
    # As values: Arrow's bytes differ with a file's row groups and its writer's types.
    for table in frame.with_format("arrow").iter(1000):
        digest.update(json.dumps(table.to_pylist(), sort_keys=True, default=repr).encode())
    return f"{len(dataset)} rows, hash {digest.hexdigest()}"
