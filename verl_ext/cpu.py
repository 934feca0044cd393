"""The platform ``cpu`` for verl, and the patches of verl, vLLM and torch that it needs.

Collectives are gloo's, and there is no device memory to manage.

Ray has no accelerator to count on such a machine, so one "device" is one ``GPU`` resource that
``ray.init(num_gpus=...)`` declares: verl's resource pools then work as they are. It may go when verl has a platform of
this name.
"""

import contextlib
import copy
import importlib.metadata
import importlib.util
import os
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_ext.guard import around

NAME = "cpu"


@PlatformRegistry.register(NAME)
class PlatformCPU(PlatformBase):
    """verl's platform interface for a CPU.

    It is its own device module: ``torch.cpu``, and the functions that ``torch.cpu`` lacks.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @property
    def device_name(self) -> str:
        return NAME

    vendor_name = device_name
    is_available = staticmethod(torch.cpu.is_available)  # type: ignore[assignment]
    device_count = staticmethod(torch.cpu.device_count)  # type: ignore[assignment]
    # "cpu": the FSDP engine calls ``tensor.to(current_device())``, for which an index would name a GPU.
    current_device = staticmethod(torch.cpu.current_device)  # type: ignore[assignment]
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)  # type: ignore[assignment]

    @property
    def device_module(self) -> Any:
        return self

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Auto-detection never picks the CPU: it is the user's choice, by VERL_PLATFORM.
        return False

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """(free, total) bytes of the machine's memory."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def memory_allocated(self, device: Any = None) -> int:
        """Resident bytes of this process."""
        return psutil.Process().memory_info().rss

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def _nothing_to_do(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing, in the place of functions that have no meaning on a CPU.

        There is one device, without a profiler, and its work is done when a call returns. The C allocator takes no
        settings of CUDA's and caches nothing that could be released here. Weights travel by shared memory, which verl
        unlinks itself.
        """

    set_device = synchronize = set_allocator_settings = empty_cache = ipc_collect = _nothing_to_do
    profiler_start = profiler_stop = cudart = _nothing_to_do

    def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        defaults = {
            # GiB of KV cache, and threads left to the scheduler: the engine shares its cores with its clients.
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # With 1, vLLM's CPU platform puts the model in a process of its own, and the engine spins on a core while it
            # waits for it. The asynchronous engine that verl uses is a process of its own in any case.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        return {"VERL_PLATFORM": NAME, **{name: os.environ.get(name, value) for name, value in defaults.items()}}


# -- verl's FSDP engines -----------------------------------------------------------------------------------------------


class CPUThreads:
    """Mixin of a training engine: it takes an equal share of all cores for each trainer process.

    Rollout processes run with one OpenMP thread each. The trainers may take all cores, because the inference engines
    are idle while they train.
    """

    def initialize(self):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // torch.distributed.get_world_size()))
        super().initialize()  # type: ignore[misc]


def register_engines(mixin: type, backends: list[str], language: type, value: type) -> None:
    """Register training engines for the device ``cpu``: ``mixin`` over each of verl's for ``cuda`` and ``npu``."""
    from verl.workers.engine.base import EngineRegistry

    for model_type, base in (("language_model", language), ("value_model", value)):
        engine = type(f"CPU{base.__name__}", (mixin, base), {"__doc__": base.__doc__})
        EngineRegistry.register(model_type=model_type, backend=backends, device=NAME)(engine)


def register_fsdp(module: Any) -> None:
    """Let verl's own FSDP engines serve the device ``cpu``."""
    register_engines(CPUThreads, ["fsdp2", "fsdp"], module.FSDPEngineWithLMHead, module.FSDPEngineWithValueHead)


def unpin_reference(module: Any) -> None:
    """Keep a reference policy's weights out of pinned memory, which torch refuses where host and device are the same.

    A model that is never updated waits in the host's memory and goes to its device a layer at a time
    (``CPUOffloadPolicy(pin_memory=True)``). Pinning makes that copy faster, and needs an accelerator.
    """

    @around(module, "CPUOffloadPolicy")
    def unpinned(torchs: Any, pin_memory: bool = True) -> Any:
        return torchs(pin_memory=False)


# -- torch and vLLM ----------------------------------------------------------------------------------------------------


def merge_gloo(module: Any) -> None:
    """Give torch one gloo backend where verl asks for two.

    verl builds the backend string ``cpu:gloo,<device>:<backend>``. Here that is ``cpu:gloo,cpu:gloo``, which torch
    refuses as a duplicate.
    """

    @around(module, "init_process_group")
    def init_process_group(torchs: Any, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return torchs("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


def answer_for_vllm_cpu(module: Any) -> None:
    """Answer ``importlib.metadata.version("vllm")`` where the installed package is ``vllm-cpu``.

    verl asks for that name at import; the CPU build is published under another. The answer ends in ``+cpu`` because
    vLLM's own detection of platforms looks for it there.
    """

    @around(module, "version")
    def version(original: Any, distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{original('vllm-cpu')}+cpu"


def keep_weights(module: Any) -> None:
    """Let vLLM's CPU linear layers keep the original of each weight that they pack.

    After loading, ``UnquantizedLinearMethod`` packs each weight for the CPU and throws the original away
    (``remove_weight=True``). The first weight sync of RL then has nothing to load into. Kept, the weight is filled by
    the sync and packed again by ``process_weights_after_loading``, which verl calls afterwards.
    """

    @around(module, "dispatch_cpu_unquantized_gemm")
    def dispatch_cpu_unquantized_gemm(vllms: Any, layer: Any, remove_weight: bool) -> None:
        vllms(layer, remove_weight=False)


def keep_expert_weights(module: Any) -> None:
    """Let vLLM's CPU expert layers keep their weights unpacked, as ``keep_weights`` does for linear layers.

    ``UnquantizedFusedMoEMethod`` overwrites a layer's weights by packed ones after the first load, and would use those
    of a later sync unpacked. Here it packs a copy of the layer after each sync, and computes with the copy. The layer's
    own weights stay unpacked for the next sync. vLLM 0.24 packs in a module of its own and is left as it is.
    """
    if importlib.util.find_spec(f"{module.__package__}.cpu_fused_moe") is not None:
        return
    method = module.UnquantizedFusedMoEMethod

    @around(method, "process_weights_after_loading")
    def process_weights_after_loading(vllms: Any, self: Any, layer: Any) -> None:
        packed = copy.copy(layer)
        packed._parameters = {
            name: each if each is None else torch.nn.Parameter(each.detach().clone(), requires_grad=False)
            for name, each in layer._parameters.items()
        }
        # vLLM packs only while there is no kernel.
        self.moe_kernel = None
        vllms(self, packed)
        # Both are modules: as a part of the other, each would have the other as its part.
        vars(self)["packed_layer"] = packed

    @around(method, "apply")
    def apply(vllms: Any, self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        return vllms(self, self.packed_layer, *args, **kwargs)
