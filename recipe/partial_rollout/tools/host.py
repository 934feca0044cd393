"""What this machine is, whatever runs on it (device, compiler, shared memory), and what a run needs of it (CPUs, disk)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.keys import ConfigError, fail
from recipe.partial_rollout.preflight.inputs import INSTALL_GPU, weight_bytes
from recipe.partial_rollout.preflight.placement_check import check_cpus

GIB = 1 << 30
STATE = 3
"""weights and Adam's two moments, each of the size of the weights"""
_ANSWER_S = 20.0
"""for nvidia-smi, which takes seconds where the driver does not stay loaded"""
_LEAST_SHARED_GIB = 1.0
_LEAST_DRIVER = 580
"""of CUDA 13, with which the extra ``gpu`` is built"""


class Finding(NamedTuple):
    """One line of the doctor."""

    name: str
    said: str
    remedy: str = ""
    """what to do about it; empty where all is well"""
    stops: bool = False
    """whether no run can start before that is done"""

    def __str__(self) -> str:
        sign = "FAIL" if self.stops else "note" if self.remedy else "ok"
        return f"{sign:<5} {self.name:<16}{self.said}{f': {self.remedy}' if self.remedy else ''}"


def wants_gpu() -> bool:
    """Whether runs here are meant for GPUs: there are some, and ``VERL_PLATFORM`` does not say cpu."""
    return shutil.which("nvidia-smi") is not None and os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu"


def gpus() -> list[tuple[str, str, str]]:
    """Name, driver's version and memory of each GPU, as nvidia-smi says; none where it fails."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (tuple(part.strip() for part in line.split(",")) for line in done.stdout.splitlines())
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def host_findings() -> Iterator[Finding]:
    """What a run on this machine's GPUs needs of it; nothing to see to where runs are not meant for GPUs."""
    if not wants_gpu():
        return
    yield device(gpus())
    yield compiler()
    yield shared_memory()


def device(found: list[tuple[str, str, str]]) -> Finding:
    """Whether torch sees the GPUs that nvidia-smi sees."""
    import torch

    if not found:
        return Finding(
            "device", "nvidia-smi lists no GPU", "give this machine or container one (--gpus all)", stops=True
        )
    name, driver, memory = found[0]
    said = f"{len(found)} x {name}, {memory}, driver {driver}"
    if torch.cuda.is_available():
        return Finding("device", said)
    said += f", and torch {torch.__version__} sees none"
    if torch.version.cuda is None:
        return Finding("device", said, f"this torch is built without CUDA; {INSTALL_GPU} brings one", stops=True)
    major = int(driver.split(".")[0]) if driver.split(".")[0].isdigit() else 0
    remedy = "set CUDA_VISIBLE_DEVICES to a device that is there, or see `python -c 'import torch; torch.cuda.init()'`"
    if major < _LEAST_DRIVER:
        remedy = f"CUDA {torch.version.cuda} needs driver {_LEAST_DRIVER} or newer"
    return Finding("device", said, remedy, stops=True)


def compiler() -> Finding:
    """Whether Triton can build the launchers of its kernels, which it does at run time."""
    found = next(
        (path for name in (os.environ.get("CC"), "gcc", "clang") if name and (path := shutil.which(name))), None
    )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    version = sysconfig.get_python_version()
    if found is None:
        return Finding("compiler", "no C compiler", "apt-get install gcc, or name one with CC", stops=True)
    if not header.is_file():
        return Finding("compiler", f"{found}, but no {header}", f"apt-get install python{version}-dev", stops=True)
    return Finding("compiler", f"{found}, {header}")


def shared_memory() -> Finding:
    """Whether Ray's object store and NCCL have room in ``/dev/shm``."""
    total = psutil.disk_usage("/dev/shm").total / GIB if Path("/dev/shm").is_dir() else 0.0
    remedy = "" if total >= _LEAST_SHARED_GIB else "docker run --ipc=host, or --shm-size=16g"
    return Finding("shared memory", f"{total:.1f} GiB in /dev/shm", remedy, stops=bool(remedy) and wants_gpu())


# -- what a run needs of it ----------------------------------------------------------------------------------------------


def checkpoint_gib(config: DictConfig, parameters: int) -> float:
    """Size of one checkpoint of FSDP: weights and moments of all shards."""
    return parameters * weight_bytes(config) * STATE / GIB


def checkpoints_at_once(config: DictConfig) -> int:
    """Checkpoints on disk at the worst moment: those that are kept, and one that is being written."""
    return (config.trainer.get("max_actor_ckpt_to_keep") or 1) + 1


def free_disk_gib(directory: Path) -> float:
    """Space that is left where ``directory`` is, or will be."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free / GIB


def machine_problems(config: DictConfig, parameters: int | None) -> Iterator[ConfigError]:
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
    if trainer.save_freq <= 0 or parameters is None:
        return
    directory, each, count = (
        Path(str(trainer.default_local_dir)),
        checkpoint_gib(config, parameters),
        checkpoints_at_once(config),
    )
    if (free := free_disk_gib(directory)) < each * count:
        yield fail(
            "trainer.default_local_dir",
            directory,
            f"a directory with {each * count:.0f} GiB free, for {count} checkpoints of {each:.1f} GiB; it has {free:.0f} "
            "(trainer.max_actor_ckpt_to_keep, trainer.save_freq)",
        )
