"""The choice of a replica for each engine call of a training sample, balanced by this worker's running samples."""

from __future__ import annotations

import zlib
from typing import Any

from recipe.partial_rollout.worker.live_sample import LiveSample

_MOVE_ABOVE = 1.25
"""a resumed sample moves if its own replica has more than this many times the running samples of the emptiest"""


class ReplicaChoice:
    """Counts running samples by replica.

    A sample that has blocks cached at a replica (``LiveSample.replica``) goes back to it, unless it resumes after an
    interruption and that replica has many more running samples than the emptiest. Any other sample goes to the replica
    with the fewest running samples. The choice takes constant time: a round at scale starts with 100,000 of them.

    Args:
        servers: address to server handle.
        place: position of this worker among all, from 0 to 1. Workers begin at different replicas, because each has too
            few samples to reach all of many replicas, and together they should.
    """

    def __init__(self, servers: dict[str, Any], place: float = 0.0) -> None:
        self.servers = dict(servers)
        addresses = list(servers)
        first = int(place * len(addresses))
        self._running = dict.fromkeys(addresses[first:] + addresses[:first], 0)
        self._with: dict[int, dict[str, None]] = {0: dict.fromkeys(self._running)}
        """addresses by number of running samples; of equals, the one that has had that number longest comes first"""
        self._fewest = 0

    def use(self, servers: dict[str, Any]) -> None:
        """From here on the replicas are ``servers``; those that stay keep their counts, whose calls may be held."""
        self.servers = dict(servers)
        for address in [address for address in self._running if address not in servers]:
            self._withdraw(address, self._running.pop(address))
        for address in servers:
            if address not in self._running:
                self._running[address] = 0
                self._with.setdefault(0, {})[address] = None
        self._fewest = min(self._with, default=0)

    def take(self, sample: LiveSample) -> tuple[str, Any]:
        """Address and handle for the next call of ``sample``, which counts as running there until ``release``."""
        own = sample.replica if sample.replica in self._running else None
        if own is None or (sample.resumes and self._running[own] > _MOVE_ABOVE * (self._fewest + 1)):
            own = next(iter(self._with[self._fewest]))
        sample.replica, sample.resumes = own, False
        self._move(own, self._running[own] + 1)
        return own, self.servers[own]

    def of_request(self, request_id: str) -> tuple[str, Any]:
        """Address and handle for the calls of a request that no training sample makes; they are not counted."""
        addresses = sorted(self._running)
        own = addresses[zlib.crc32(request_id.encode()) % len(addresses)]
        return own, self.servers[own]

    def release(self, address: str) -> None:
        """Note that a call at ``address`` has ended."""
        if address in self._running:
            self._move(address, self._running[address] - 1)

    def leave(self, sample: LiveSample, address: str) -> bool:
        """Drop the dead replica at ``address``, where ``sample`` was; returns whether any other is left."""
        if address in self._running:
            self._withdraw(address, self._running.pop(address))
            self._fewest = min(self._with, default=0)
        if sample.replica == address:
            sample.replica = None
        return bool(self._running)

    def _move(self, address: str, running: int) -> None:
        before, self._running[address] = self._running[address], running
        self._withdraw(address, before)
        self._with.setdefault(running, {})[address] = None
        # Counts change by one: if no replica has the fewest any more, this one's new count is the fewest.
        if running < self._fewest or self._fewest not in self._with:
            self._fewest = running

    def _withdraw(self, address: str, running: int) -> None:
        del self._with[running][address]
        if not self._with[running]:
            del self._with[running]
