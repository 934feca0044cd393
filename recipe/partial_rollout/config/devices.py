"""Devices of the trainer and of the engines."""

from __future__ import annotations

from omegaconf import DictConfig

from recipe.partial_rollout.config.choices import Placement


def trainer_devices(config: DictConfig) -> int:
    """Devices of the trainer; with ``placement=colocated`` the engines use them, too."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def engine_devices(config: DictConfig) -> int:
    """Devices that are the engines' alone: 0 with ``placement=colocated``."""
    if config.partial_rollout.placement != Placement.SEPARATE:
        return 0
    rollout = config.actor_rollout_ref.rollout
    return rollout.nnodes * rollout.n_gpus_per_node


def pinned_cores(config: DictConfig) -> int:
    """Cores that are the trainer's alone; 0: all processes share all, or compute on GPUs."""
    ours = config.partial_rollout
    alone = ours.placement == Placement.SEPARATE and config.trainer.device == "cpu"
    return ours.trainer_cores or 0 if alone else 0
