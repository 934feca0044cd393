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
    with the fewest running samples; of equals, to the one that no sample has gone to for longest.

    Args:
        servers: address to server handle.
        place: position of this worker among all, from 0 to 1. Workers begin at different replicas, because each has too
            few samples to reach all of many replicas, and together they should.
    """

    def __init__(self, servers: dict[str, Any], place: float = 0.0) -> None:
        self.servers = servers
        addresses = list(servers)
        first = int(place * len(addresses))
        self._running = dict.fromkeys(addresses[first:] + addresses[:first], 0)
        """running samples by address; the one that was taken last comes last"""

    def use(self, servers: dict[str, Any]) -> None:
        """From here on the replicas are ``servers``; those that stay keep their counts, whose calls may be held."""
        self.servers = servers
        living = {address: count for address, count in self._running.items() if address in servers}
        self._running = {**living, **{address: 0 for address in servers if address not in living}}

    def take(self, sample: LiveSample) -> tuple[str, Any]:
        """Address and handle for the next call of ``sample``, which counts as running there until ``release``."""
        fewest = min(self._running, key=self._running.__getitem__)
        own = sample.replica if sample.replica in self._running else fewest
        if sample.resumes and self._running[own] > _MOVE_ABOVE * (self._running[fewest] + 1):
            own = fewest
        sample.replica, sample.resumes = own, False
        self._running[own] = self._running.pop(own) + 1
        return own, self.servers[own]

    def of_request(self, request_id: str) -> tuple[str, Any]:
        """Address and handle for the calls of a request that no training sample makes; they are not counted."""
        addresses = sorted(self._running)
        own = addresses[zlib.crc32(request_id.encode()) % len(addresses)]
        return own, self.servers[own]

    def release(self, address: str) -> None:
        """Note that a call at ``address`` has ended."""
        if address in self._running:
            self._running[address] -= 1

    def leave(self, sample: LiveSample, address: str) -> bool:
        """Drop the dead replica at ``address``, where ``sample`` was; returns whether any other is left."""
        self._running.pop(address, None)
        if sample.replica == address:
            sample.replica = None
        return bool(self._running)
