"""verl's worker groups with a rendezvous port that nothing else takes in between.

verl finds a free port and listens on it seconds later, in another process. A port that the kernel hands out
(``ip_local_port_range``) may by then belong to one of the many connections that Ray opens, and the start of the training
fails with EADDRINUSE. Ports below that range are taken only by whoever asks for them by number.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

_WIDTH = 1000


def ephemeral_start(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int:
    """First port that the kernel hands out by itself; Linux's default where ``path`` does not say."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def master_port_range() -> list[int]:
    """A random stretch of ports below the kernel's own, ``[first, end)``; all of them when there is no room below."""
    end = ephemeral_start()
    if end < 10_000 + _WIDTH:
        return [10_000, 65_535]
    first = random.randrange(10_000, end - _WIDTH + 1)
    return [first, first + _WIDTH]


def with_master_ports(worker_group_class: type) -> type:
    """``worker_group_class`` (verl's ``RayWorkerGroup``), whose ``master_port_range`` is ``master_port_range()``."""

    class MasterPortWorkerGroup(worker_group_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.setdefault("master_port_range", master_port_range())
            super().__init__(*args, **kwargs)

    return MasterPortWorkerGroup
