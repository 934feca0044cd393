"""verl's own Megatron engines on the device ``cpu``: float32, dense models, over gloo.

The tests show by it what a CPU shares with a GPU: layouts, conversion of weights, inputs of the loss, checkpoints.
Megatron-Core names ``cuda`` and calls it without looking for a device, so it is replaced, and so are Transformer Engine's
layers (``layers``). This happens in the process that builds such an engine, when it builds it. ``plugin`` registers the
engines.
"""

import functools
import importlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from verl_ext import cpu
from verl_ext.guard import around, installed

MEGATRON_CORE, MBRIDGE = "0.16.1", "0.15.1"
"""releases, as in the extra ``megatron``"""
_CALLED = ("current_device", "get_rng_state", "synchronize")
"""functions of ``torch.cuda`` that fail without a device"""


class CUDAIsTheCPU(TorchFunctionMode):
    """The device ``cuda`` is the CPU, and types of tensors are named as there: Megatron's optimizers compare names."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = cpu.NAME
        result = func(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else result


@functools.cache
def _replace_cuda() -> None:
    assert (installed("megatron-core"), installed("mbridge")) == (MEGATRON_CORE, MBRIDGE)
    for name in _CALLED:
        setattr(torch.cuda, name, getattr(cpu.PlatformCPU(), name))
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
    # Megatron compiles small functions, for which this process may have no compiler.
    importlib.import_module("torch._dynamo.config").disable = True  # type: ignore[attr-defined]
    CUDAIsTheCPU().__enter__()


def _replace_layers() -> None:
    from tests.megatron.layers import decoder_block_spec

    bridge = importlib.import_module("mbridge.core.llm_bridge")
    bridge.get_gpt_decoder_block_spec = decoder_block_spec  # type: ignore[attr-defined]


class OnTheCPU(cpu.CPUThreads):
    """A Megatron engine whose optimizers are torch's: Megatron cannot resume those without help."""

    optimizer: Any

    def __init__(self, *args, **kwargs):
        _replace_cuda()
        _replace_layers()
        super().__init__(*args, **kwargs)

    def initialize(self):
        """Build model and optimizer, whose state exists at once: Megatron asks for its step before it loads one."""
        super().initialize()
        for adam, _, parameter in self._updated():
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[parameter] = {"step": torch.tensor(0.0), **moments}

    # Megatron copies into float32 parameters, and turns gradients off for half precision only.
    @torch.no_grad()
    def load_checkpoint(self, *args, **kwargs):
        """Load, and count steps from the checkpoint's: Megatron leaves all parameters one counter, at 0."""
        super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        for adam, group, parameter in self._updated():
            adam.state[parameter]["step"] = torch.tensor(float(group["step"]))

    def _updated(self):
        """(torch's optimizer, group, parameter) for all that this process updates."""
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            adam = part and part.optimizer
            for group in adam.param_groups if adam else ():
                yield from ((adam, group, parameter) for parameter in group["params"])


def register(module: Any) -> None:
    """verl's own Megatron engines serve the device ``cpu``."""
    cpu.register_engines(OnTheCPU, ["megatron"], module.MegatronEngineWithLMHead, module.MegatronEngineWithValueHead)


def accept_float32(module: Any) -> None:
    """verl's configuration takes float32, and not half precisions alone."""

    @around(module.McoreEngineConfig, "__post_init__")
    def __post_init__(verls: Any, self: Any) -> None:
        dtype = self.dtype
        object.__setattr__(self, "dtype", "bfloat16" if dtype == "float32" else dtype)
        verls(self)
        object.__setattr__(self, "dtype", dtype)
