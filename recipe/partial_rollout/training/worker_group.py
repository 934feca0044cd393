"""verl's worker groups, with rendezvous ports that no other process takes by chance.

verl finds a free port and listens on it seconds later, in another process. By then a port from the kernel's own range
(``ip_local_port_range``) may belong to one of Ray's many connections, and the training fails to start with EADDRINUSE.
Ports below that range are taken only by processes that ask for them by number.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

_WIDTH = 1000


def ephemeral_start(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int:
    """First port that the kernel assigns by itself; Linux's default if ``path`` does not say."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def master_port_range() -> list[int]:
    """A random range of ports below the kernel's own, ``[first, end)``; all ports if there is no room below."""
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
