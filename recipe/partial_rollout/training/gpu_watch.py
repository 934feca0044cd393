"""Average utilisation of the GPUs in a step: the share of time in which a kernel ran, as NVML counts it.

Not run on a GPU yet: the tests replace NVML.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Self

import pynvml
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_EVERY_S = 1.0
"""between two samples; NVML itself averages over up to a second"""
_DEADLINE_S = 10.0
"""for the samples of all nodes; a step is logged without them rather than late"""


class GpuSampler:
    """Samples every GPU of its node in a thread; does nothing where NVML finds none.

    NVML sees all GPUs of a node, also those that Ray was not given.
    """

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._sum, self._count = 0.0, 0
        try:
            pynvml.nvmlInit()
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:
            self._devices = []
        if self._devices:
            threading.Thread(target=self._run, daemon=True, name="gpu-sampler").start()

    def take(self) -> tuple[float, int]:
        """Sum of the utilisations (shares, 0 to 1) sampled since the last call, and their number."""
        with self._lock:
            taken = self._sum, self._count
            self._sum, self._count = 0.0, 0
        return taken

    def sample(self) -> None:
        """Sample each GPU once."""
        for device in self._devices:
            try:
                share = float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu) / 100
            except pynvml.NVMLError:
                # A GPU in MIG mode does not say.
                continue
            with self._lock:
                self._sum += share
                self._count += 1

    def _run(self) -> None:
        while True:
            self.sample()
            time.sleep(self._every_s)


class GpuWatch:
    """Handles of ``GpuSampler`` actors, one a node; the driver asks them once a step."""

    def __init__(self, samplers: list[Any]) -> None:
        self._samplers = samplers

    @classmethod
    def of_cluster(cls) -> Self:
        """One sampler on each live node of Ray's cluster that has GPUs: none on a cluster without."""
        nodes = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("GPU", 0) > 0]
        sampler = ray.remote(num_cpus=0)(GpuSampler)
        places = [NodeAffinitySchedulingStrategy(node, soft=True) for node in nodes]
        return cls([sampler.options(scheduling_strategy=place).remote() for place in places])

    def take_metrics(self) -> dict[str, float]:
        """``gpu/utilisation``: mean over GPUs and time since the last call, 0 to 1; nothing without a sample."""
        if not self._samplers:
            return {}
        try:
            taken = ray.get([sampler.take.remote() for sampler in self._samplers], timeout=_DEADLINE_S)
        except RayError:
            return {}
        count = sum(samples for _, samples in taken)
        return {"gpu/utilisation": sum(total for total, _ in taken) / count} if count else {}
