"""Checks of the checkpoints that a training would resume from (they are whole, and their sizes are the settings') and of
the rows that its own would hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.checkpoint.manifest import ForeignCheckpointError, TornCheckpointError, verify
from recipe.partial_rollout.checkpoint.plain_codec import UnsaveableError, pack
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints
from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.config.resume_sizes import ResumeSizes
from recipe.partial_rollout.config.settings import PartialRolloutConfig

_ROWS = 256
"""rows that are tried, spread over the dataset: its columns have types, but their first rows may be null"""


def check_rows(config: DictConfig, dataset: Sequence[dict[str, Any]]) -> None:
    """Raise ``ConfigError`` for a column of ``dataset`` that a checkpoint cannot hold."""
    if not config.partial_rollout.enable or config.trainer.save_freq <= 0:
        return
    for i in np.linspace(0, len(dataset) - 1, min(len(dataset), _ROWS)).astype(int).tolist():
        try:
            pack({column: value for column, value in dataset[i].items() if not isinstance(value, torch.Tensor)})
        except UnsaveableError as error:
            remedy = "(store it as text, or train without checkpoints: trainer.save_freq=-1)"
            raise fail("data.train_files", config.data.train_files, f"row {i}, column {error} {remedy}") from None


def check_checkpoints(config: DictConfig) -> None:
    """Raise ``ConfigError`` where the checkpoint that ``trainer.resume_mode`` asks for cannot be resumed."""
    trainer, mode = config.trainer, config.trainer.resume_mode
    if mode not in ("auto", "resume_path", "disable"):
        raise fail("trainer.resume_mode", mode, "one of auto, resume_path, disable")
    path = trainer.get("resume_from_path")
    if mode == "resume_path" and not (path and Path(str(path)).is_dir() and "global_step_" in Path(str(path)).name):
        raise fail(
            "trainer.resume_from_path", path, "an existing .../global_step_K with trainer.resume_mode=resume_path"
        )
    if trainer.get("default_hdfs_dir"):
        raise fail(
            "trainer.default_hdfs_dir", trainer.default_hdfs_dir, "null: what is in flight is saved locally only"
        )
    for part in ("actor_rollout_ref.actor", "critic"):
        if OmegaConf.select(config, f"{part}.checkpoint.async_save"):
            raise fail(f"{part}.checkpoint.async_save", True, "False: a checkpoint is sealed when it is whole")
    try:
        found = RunCheckpoints(Path(trainer.default_local_dir), checksum_all=False).to_resume(mode, path)
    except (TornCheckpointError, ForeignCheckpointError) as error:
        raise fail("trainer.resume_mode", mode, str(error)) from error
    if found is not None:
        _check_sizes(found, PartialRolloutConfig.from_config(config))
        _check_trainers(found, trainer.nnodes * trainer.n_gpus_per_node)


def _check_sizes(checkpoint: Path, settings: PartialRolloutConfig) -> None:
    saved = verify(checkpoint).facts["sizes"]
    theirs = ResumeSizes(saved["batch_groups"], saved["samples_per_group"], saved["max_staleness"])
    if other := settings.resume_sizes.mismatch(theirs):
        raise fail(other.key, other.here, other.allowed_by(f"as in {checkpoint}"))
    if saved.get("filter_groups") and settings.group_filter is None:
        raise fail(
            "algorithm.filter_groups.enable", False, f"True, as in {checkpoint}: it consumed more than it trained"
        )


def _check_trainers(checkpoint: Path, trainers: int) -> None:
    """FSDP's shards belong to a number of trainers, on whichever nodes; Megatron's checkpoints have no such file."""
    path = checkpoint / "actor" / "fsdp_config.json"
    saved = json.loads(path.read_text())["world_size"] if path.exists() else trainers
    if saved != trainers:
        key = "trainer.nnodes * trainer.n_gpus_per_node"
        raise fail(key, trainers, f"{saved}, as in {checkpoint}: its shards belong to that many trainers")
