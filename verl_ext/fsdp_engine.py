"""Registration: verl's own FSDP engines serve the device ``cpu``, with every core while they train.

verl registers them for ``cuda`` and ``npu`` only. Rollout processes run with one OpenMP thread each; the trainer takes
all cores because the engine is idle while it works, or the cores that are its own (``cores``), where it is not.
"""

import os

import torch
import wrapt

from verl_ext import cores
from verl_ext.guard import VERL, require

_TARGET = "verl.workers.engine.fsdp.transformer_impl"


def training_threads(world_size: int) -> int:
    """Threads for each of ``world_size`` trainer processes of this node."""
    return max(1, (len(cores.of_the_trainer()) or os.cpu_count() or 1) // world_size)


def _register(module) -> None:
    from verl.workers.engine.base import EngineRegistry

    class CPUThreads:
        """Takes this process's share of the cores when the engine is built."""

        def initialize(self):
            if own := cores.of_the_trainer():
                cores.move_to(own)
            torch.set_num_threads(training_threads(torch.distributed.get_world_size()))
            super().initialize()  # type: ignore[misc]

    registered = EngineRegistry._engines.get("language_model", {}).get("fsdp2", {})
    if "cpu" in registered:
        return

    for model_type, base in (
        ("language_model", module.FSDPEngineWithLMHead),
        ("value_model", module.FSDPEngineWithValueHead),
    ):
        engine = type(f"CPU{base.__name__}", (CPUThreads, base), {"__doc__": base.__doc__})
        EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(engine)


def install() -> None:
    require("verl", VERL, "fsdp_engine")
    wrapt.register_post_import_hook(_register, _TARGET)
