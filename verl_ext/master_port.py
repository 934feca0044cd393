"""Patch: the workers of a group meet at a port that the kernel hands to nobody.

verl finds a free port and listens on it seconds later, in another process. By then one of Ray's many connections may have
taken a port that the kernel assigns, and the training fails to start with EADDRINUSE. Ports below are taken only by
processes that ask for them by number. It may go when verl listens on the port that it finds.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from verl_ext.guard import around

_WIDTH = 1000
"""ports of a range"""


def master_port_range(kernels: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> list[int]:
    """A random range of ports ``[first, end)`` below those that the kernel assigns; all if there is no room below."""
    end = int(kernels.read_text().split()[0])
    if end < 10_000 + _WIDTH:
        return [10_000, 65_535]
    first = random.randrange(10_000, end - _WIDTH + 1)
    return [first, first + _WIDTH]


def patch(module: Any) -> None:
    """``RayWorkerGroup`` of ``module`` has such a range unless it is told another."""

    @around(module.RayWorkerGroup, "__init__")
    def __init__(verls: Any, *args: Any, **kwargs: Any) -> None:
        verls(*args, **{"master_port_range": master_port_range(), **kwargs})
