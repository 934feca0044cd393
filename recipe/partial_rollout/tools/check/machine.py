"""Findings about this machine, in the order in which a user should act on them, and what it lacks for a run."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic

from recipe.partial_rollout.checkpoint.run_checkpoints import claim_retention
from recipe.partial_rollout.config import releases
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight import vllm_contract
from recipe.partial_rollout.preflight.inputs import INSTALL_GPU, check_cluster
from recipe.partial_rollout.tools.check.memory import GIB, ModelSize, checkpoint_gib
from recipe.partial_rollout.waits import one_line
from verl_ext import command, packed_attention
from verl_ext.guard import cpu_requested, installed

_MODULES = (
    "torch",
    "ray",
    "swanlab",
    "hydra",
    "vllm.v1.engine.async_llm",
    "transformers.models.qwen3.modeling_qwen3",
    "verl.trainer.ppo.ray_trainer",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)


class Finding(NamedTuple):
    """One line of a check."""

    name: str
    text: str
    remedy: str = ""
    """what to do about it; empty where all is well"""
    stops: bool = False
    """whether no run can start until the user has done so"""

    def __str__(self) -> str:
        sign = "FAIL" if self.stops else "note" if self.remedy else "ok"
        return f"{sign:<5} {self.name:<16}{self.text}{f': {self.remedy}' if self.remedy else ''}"


def findings() -> Iterator[Finding]:
    """Yield the findings about this machine: releases, imports, GPUs and compiler, attention."""
    yield versions()
    yield stack()
    if wants_gpu():
        yield device()
        yield compiler()
    else:
        yield Finding("device", "CPU" if cpu_requested() else "no GPU: nvidia-smi is not found")
    yield flash_attention()


def wants_gpu() -> bool:
    """Whether runs here are meant for GPUs: there are some, and ``VERL_PLATFORM`` does not say cpu."""
    return shutil.which("nvidia-smi") is not None and not cpu_requested()


def versions() -> Finding:
    """Name the installed releases. Unsupported ones stop every run; a note lists what an untested vLLM turns off."""
    text = f"verl {installed('verl')}, vLLM {releases.vllm()}, torch {installed('torch')}"
    text += f", transformers {installed('transformers')}, Ray {installed('ray')}, Python {sys.version.split()[0]}"
    problem = releases.refusal()
    return Finding("versions", text, problem or releases.tolerance(), stops=problem is not None)


def stack() -> Finding:
    """Check three things: Python and Ray's workers would import this installation of the recipe; verl, vLLM and the
    other libraries import; vLLM has every name that the recipe uses."""
    problem = command.foreign_recipe() or _import_failure()
    if problem is not None:
        return Finding("stack", problem, INSTALL_GPU if wants_gpu() else "bash run_scripts/setup.sh", stops=True)
    from verl.plugin.platform import get_platform

    return Finding("stack", f"imports; platform {get_platform().vendor_name}; {command.NAME} from {command.OURS}")


def _import_failure() -> str | None:
    try:
        for name in _MODULES:
            importlib.import_module(name)
    except Exception as error:
        # Any error: a library built for another torch fails with the error of its loader.
        return one_line(error)
    return next(vllm_contract.lacks(vllm_contract.entries(vllm_contract.NEEDED)), None)


def device() -> Finding:
    """Name the GPUs that torch sees; if it sees none, give torch's own error."""
    import torch

    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return Finding("device", f"torch {torch.__version__} sees no GPU", one_line(error), stops=True)
    first = torch.cuda.get_device_properties(0)
    return Finding("device", f"{torch.cuda.device_count()} x {first.name}, {first.total_memory / GIB:.0f} GiB")


def compiler() -> Finding:
    """Whether Triton can build the launchers of its kernels, which it does at run time."""
    names = [name for name in (os.environ.get("CC"), "gcc", "clang") if name]
    found = next(filter(None, map(shutil.which, names)), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if found is None:
        return Finding("compiler", "no C compiler", "apt-get install gcc, or name one with CC", stops=True)
    if not header.is_file():
        remedy = f"apt-get install python{sysconfig.get_python_version()}-dev"
        return Finding("compiler", f"{found}, but no {header}", remedy, stops=True)
    return Finding("compiler", f"{found}, {header}")


def flash_attention() -> Finding:
    """Name the attention that the trainer uses for models whose config chooses none; flash-attn if it is installed."""
    problem = packed_attention.flash_attn_problem()
    if problem is None:
        return Finding("attention", packed_attention.FLASH)
    remedy = packed_attention.INSTALL if wants_gpu() else ""
    return Finding("attention", f"{packed_attention.NAME}: {problem}", remedy)


# -- what a run needs of it ----------------------------------------------------------------------------------------------


def kept_checkpoints(config: DictConfig) -> int | None:
    """Return how many checkpoints the run keeps; None: all."""
    return claim_retention(config.trainer.copy(), critic=need_critic(config))


def lacks(config: DictConfig, size: ModelSize | None) -> Iterator[Finding]:
    """Yield what this machine lacks for a run: a GPU that torch sees, a C compiler, CPUs, disk. GPUs are not counted.

    Yield nothing if the run joins a Ray cluster or has several nodes, because another machine then trains. If the run
    needs GPUs and this machine has none, yield only a note.
    """
    address = os.environ.get("RAY_ADDRESS") or OmegaConf.select(config, "ray_kwargs.ray_init.address")
    trainer = config.trainer
    if address not in (None, "", "local") or trainer.nnodes > 1:
        return
    if trainer.device == "cuda" and shutil.which("nvidia-smi") is None:
        yield Finding(
            "device",
            "this machine has no GPU, so its CPUs and disk are not checked either",
            "check again on the machine that will train",
        )
        return
    if trainer.device == "cuda" and wants_gpu():
        yield from (found for found in (device(), compiler()) if found.stops)
    cpus = OmegaConf.select(config, "ray_kwargs.ray_init.num_cpus") or os.cpu_count() or 1
    try:
        check_cluster(config, {"CPU": cpus, "GPU": math.inf})
    except ConfigError as error:
        yield Finding("missing", str(error), stops=True)
    if trainer.save_freq <= 0 or size is None:
        return
    directory = Path(str(trainer.default_local_dir))
    # One more than are kept, because the next is written before the oldest is removed. A run that keeps all begins with 2.
    count = (kept_checkpoints(config) or 1) + 1
    needed = checkpoint_gib(config, size) * count
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if os.path.isdir(path))
    free = shutil.disk_usage(existing).free / GIB
    if free < needed:
        yield Finding(
            "disk",
            f"{free:.0f} GiB free for trainer.default_local_dir={directory}",
            f"{needed:.0f} GiB are needed for {count} checkpoints of {needed / count:.1f} GiB "
            "(trainer.max_actor_ckpt_to_keep)",
            stops=True,
        )
