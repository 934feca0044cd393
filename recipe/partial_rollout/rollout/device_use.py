"""How busy the GPUs of the driver's node are, as NVML samples it (``nvidia-smi``'s utilisation)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import ray

from recipe.partial_rollout.terminal import say


class DeviceUse:
    """Measures the device use in a thread, until the process ends.

    Args:
        sample: returns the share of time, 0 to 1, in which a kernel ran, averaged over the devices.
        every_s: seconds between two calls of ``sample``; NVML averages over the last sixth of a second to a second.
    """

    def __init__(self, sample: Callable[[], float], every_s: float = 0.5) -> None:
        self._sample, self._every_s = sample, every_s
        self._seen: deque[tuple[float, float]] = deque(maxlen=100_000)
        """samples as (unix seconds, share); at the default interval of 0.5 s they cover the last fourteen hours"""
        threading.Thread(target=self._watch, name="device use", daemon=True).start()

    @classmethod
    def of_this_node(cls) -> DeviceUse | None:
        """Start sampling all GPUs of this node. Return None if NVML or a GPU is missing, or if Ray has only some GPUs.

        Other jobs may run on the GPUs that Ray does not have, and NVML would count their kernels.
        """
        try:
            import pynvml

            # Not torch, which counts what Ray leaves visible to this process: none.
            pynvml.nvmlInit()
            devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            node = ray.get_runtime_context().get_node_id()
            of_ray = sum(int(each["Resources"].get("GPU", 0)) for each in ray.nodes() if each["NodeID"] == node)
        except Exception:
            # No package, library, driver or right to ask: whatever it is, a run needs no such figure.
            return None
        if not devices or of_ray != len(devices):
            return None

        def sample() -> float:
            percents = [float(pynvml.nvmlDeviceGetUtilizationRates(each).gpu) for each in devices]
            return sum(percents) / len(percents) / 100

        return cls(sample)

    def within(self, start: float, end: float) -> float | None:
        """Mean share from ``start`` to ``end`` (unix seconds), None without a sample."""
        # A copy: the thread appends meanwhile, and a deque that grows cannot be iterated.
        shares = [share for at, share in list(self._seen) if start <= at <= end]
        return sum(shares) / len(shares) if shares else None

    def _watch(self) -> None:
        try:
            while True:
                self._seen.append((time.time(), self._sample()))
                time.sleep(self._every_s)
        except Exception as error:
            say(
                f"warning: NVML no longer answers ({error}): rollout/device_use is no longer recorded; the training goes on"
            )
