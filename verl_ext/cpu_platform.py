"""The platform ``cpu`` for verl: gloo collectives, shared-memory weight transfer, no device memory to manage.

Ray has no accelerator to count on such a machine, so one "device" is one ``GPU`` resource that ``ray.init(num_gpus=...)``
declares: verl's resource pools then work as they are.
"""

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NAME = "cpu"


class CPUDeviceModule(types.ModuleType):
    """``torch.cpu`` plus what verl calls on a device module: memory counters and the RNG state."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        """(free, total) bytes of the machine's memory."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        """Resident bytes of this process."""
        return psutil.Process().memory_info().rss

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    @staticmethod
    def set_device(device: Any) -> None:
        """There is one CPU device."""

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "CPU"

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def empty_cache() -> None:
        """The C allocator caches nothing that could be released here."""

    @staticmethod
    def ipc_collect() -> None:
        """Weights travel by shared memory, which verl unlinks itself."""


device_module = CPUDeviceModule("verl_ext.cpu_device")


class PlatformCPU(PlatformBase):
    """verl's hardware interface on a machine without an accelerator."""

    @property
    def device_name(self) -> str:
        return NAME

    @property
    def vendor_name(self) -> str:
        return NAME

    @property
    def device_module(self) -> types.ModuleType:
        return device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Auto-detection never picks the CPU: it is the user's choice, by VERL_PLATFORM.
        return False

    def current_device(self) -> str:  # type: ignore[override]
        # The FSDP engine calls ``tensor.to(current_device())``, for which an index would name a GPU.
        return NAME

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one CPU device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """CPU work is done when the call returns."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The settings are those of the CUDA allocator."""

    def empty_cache(self) -> None:
        """The C allocator caches nothing that could be released here."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """There is no device profiler."""

    def profiler_stop(self) -> None:
        """There is no device profiler."""

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

    def cudart(self) -> None:
        return None


def register() -> None:
    """Make ``VERL_PLATFORM=cpu`` mean this platform."""
    if PlatformRegistry.get(NAME) is not PlatformCPU:
        PlatformRegistry.register(NAME)(PlatformCPU)
