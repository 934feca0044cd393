"""Registration: verl's own FSDP engines serve the device ``cpu``, with every core while they train.

verl registers them for ``cuda`` and ``npu`` only. Rollout processes run with one OpenMP thread each; the trainer takes
all cores, because in turns with it the engine is idle.
"""

import os

import torch
import wrapt

from verl_ext.guard import VERL, require

_TARGET = "verl.workers.engine.fsdp.transformer_impl"


def training_threads(world_size: int) -> int:
    """Threads for each of ``world_size`` trainer processes of this node."""
    return max(1, (os.cpu_count() or 1) // world_size)


class CPUThreads:
    """Takes this process's share of the cores when the engine is built."""

    def initialize(self):
        torch.set_num_threads(training_threads(torch.distributed.get_world_size()))
        super().initialize()  # type: ignore[misc]


def register(mixin: type, backends: list[str], language: type, value: type) -> None:
    """Register engines for the device ``cpu``: each a ``mixin`` over one of verl's. Safe to call twice."""
    from verl.workers.engine.base import EngineRegistry

    if "cpu" in EngineRegistry._engines.get("language_model", {}).get(backends[0], {}):
        return
    for model_type, base in (("language_model", language), ("value_model", value)):
        engine = type(f"CPU{base.__name__}", (mixin, base), {"__doc__": base.__doc__})
        EngineRegistry.register(model_type=model_type, backend=backends, device="cpu")(engine)


def _register(module) -> None:
    register(CPUThreads, ["fsdp2", "fsdp"], module.FSDPEngineWithLMHead, module.FSDPEngineWithValueHead)


def install() -> None:
    require("verl", VERL, "fsdp_engine")
    wrapt.register_post_import_hook(_register, _TARGET)
