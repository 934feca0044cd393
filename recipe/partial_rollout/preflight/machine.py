"""What a run needs of its machine: packages, CPUs for Ray, disk for checkpoints. Check, start and doctor ask here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.keys import ConfigError, fail
from recipe.partial_rollout.config.settings import engine_devices, trainer_devices
from recipe.partial_rollout.preflight.host import GIB, INSTALL_GPU, host_findings
from recipe.partial_rollout.preflight.model_shape import ModelShape

CPUS_PER_TRAINER, CPUS_PER_ENGINE = 3, 2
"""that verl's placement groups reserve with each device; the second, where engines have devices of their own"""
STATE = 3
"""weights and Adam's two moments, each of the size of the weights"""


class Package(NamedTuple):
    """A package of the extra ``gpu`` that a run imports if ``key`` has ``value``."""

    module: str
    key: str
    value: str


PACKAGES = (
    Package("cupy", "actor_rollout_ref.rollout.checkpoint_engine.backend", "nccl"),
    Package("transfer_queue", "trainer.v1.trainer_mode", "colocate_async"),
)
"""the optional imports of the documented commands"""


def missing_packages(config: DictConfig) -> Iterator[ConfigError]:
    """An error for each package that ``config`` needs and this environment lacks."""
    for module, key, value in PACKAGES:
        # Every arm has a trainer mode; verl's v1 trainer alone reads it.
        unread = key.startswith("trainer.v1.") and not config.trainer.use_v1
        if OmegaConf.select(config, key) == value and not unread and find_spec(module) is None:
            yield fail(
                key, value, f"another, or the package {module}, which is not installed: `{INSTALL_GPU}` brings it"
            )


def cpus_for_ray(config: DictConfig) -> int:
    """CPUs without which Ray would wait for ever to place trainers, engines and the rest."""
    return CPUS_PER_TRAINER * trainer_devices(config) + CPUS_PER_ENGINE * engine_devices(config) + 1


def check_cpus(config: DictConfig, available: int) -> None:
    """Refuse more devices than the ``available`` CPUs of Ray can serve.

    Raises:
        ConfigError: in one line.
    """
    if (needed := cpus_for_ray(config)) > available:
        raise fail(
            "trainer.n_gpus_per_node",
            config.trainer.n_gpus_per_node,
            f"fewer devices, or {needed} CPUs for Ray, which has {available}: verl reserves {CPUS_PER_TRAINER} for a "
            f"device of the trainer and {CPUS_PER_ENGINE} for one of separate engines, and waits for them without end",
        )


def checkpoint_gib(config: DictConfig, shape: ModelShape) -> float:
    """Size of one checkpoint of FSDP: weights and moments of all shards."""
    return shape.parameters * weight_bytes(config) * STATE / GIB


def checkpoints_at_once(config: DictConfig) -> int:
    """Checkpoints on disk at the worst moment: those that are kept, and one that is being written."""
    return (config.trainer.get("max_actor_ckpt_to_keep") or 1) + 1


def weight_bytes(config: DictConfig) -> int:
    """Bytes of a weight in the trainer."""
    fsdp = config.actor_rollout_ref.actor.get("fsdp_config") or {}
    return {"fp32": 4, "float32": 4}.get(str(fsdp.get("model_dtype", "fp32")), 2)


def free_disk_gib(directory: Path) -> float:
    """Space that is left where ``directory`` is, or will be."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free / GIB


def machine_problems(config: DictConfig, shape: ModelShape | None) -> Iterator[ConfigError]:
    """An error for each thing that this machine lacks, if it is the one that will train.

    It is not where a Ray cluster is joined, or where the devices are GPUs and it has none.
    """
    address = os.environ.get("RAY_ADDRESS") or OmegaConf.select(config, "ray_kwargs.ray_init.address")
    trainer = config.trainer
    if address not in (None, "", "local") or trainer.nnodes > 1:
        return
    if trainer.device == "cuda" and shutil.which("nvidia-smi") is None:
        return
    if trainer.device == "cuda":
        yield from (fail("trainer.device", "cuda", f"{at.said}: {at.remedy}") for at in host_findings() if at.stops)
    try:
        check_cpus(config, OmegaConf.select(config, "ray_kwargs.ray_init.num_cpus") or os.cpu_count() or 1)
    except ConfigError as error:
        yield error
    if trainer.save_freq <= 0 or shape is None:
        return
    directory, each, count = (
        Path(str(trainer.default_local_dir)),
        checkpoint_gib(config, shape),
        checkpoints_at_once(config),
    )
    if (free := free_disk_gib(directory)) < each * count:
        yield fail(
            "trainer.default_local_dir",
            directory,
            f"a directory with {each * count:.0f} GiB free, for {count} checkpoints of {each:.1f} GiB; it has {free:.0f} "
            "(trainer.max_actor_ckpt_to_keep, trainer.save_freq)",
        )
