"""How busy the GPUs of the driver's node are, as NVML samples it (``nvidia-smi``'s utilisation)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import ray
import torch
from tqdm import tqdm

EVERY_S = 0.5
"""seconds between samples; NVML's own are over the last sixth of a second to a second"""


class DeviceUse:
    """Samples in a thread of its own, until the process ends.

    Args:
        sample: the share of time, 0 to 1, in which a kernel ran: mean over the devices.
        every_s: seconds between samples.
    """

    def __init__(self, sample: Callable[[], float], every_s: float = EVERY_S) -> None:
        self._sample, self._every_s = sample, every_s
        self._seen: deque[tuple[float, float]] = deque()
        """unix seconds and share"""
        threading.Thread(target=self._watch, name="device use", daemon=True).start()

    @classmethod
    def of_this_node(cls) -> DeviceUse | None:
        """None where there is no device, or Ray has only some of the devices: others' jobs run on the rest."""
        count = torch.cuda.device_count()
        if not count or not ray.is_initialized():
            return None
        node = ray.get_runtime_context().get_node_id()
        of_ray = sum(int(each["Resources"].get("GPU", 0)) for each in ray.nodes() if each["NodeID"] == node)
        percent = torch.cuda.utilization
        return cls(lambda: sum(percent(i) for i in range(count)) / count / 100) if of_ray == count else None

    def within(self, start: float, end: float) -> float | None:
        """Mean share from ``start`` to ``end`` (unix seconds), None without a sample; forgets what is before ``end``."""
        seen = list(self._seen)
        for _ in range(sum(at <= end for at, _ in seen)):
            self._seen.popleft()
        shares = [share for at, share in seen if start <= at <= end]
        return sum(shares) / len(shares) if shares else None

    def _watch(self) -> None:
        try:
            while True:
                self._seen.append((time.time(), self._sample()))
                time.sleep(self._every_s)
        except Exception as error:
            tqdm.write(f"warning: rollout/device_use ends here, NVML no longer answers ({error})")
