"""Which replica an engine call of a training sample goes to: balanced by running samples, of this worker alone."""

from __future__ import annotations

from typing import Any

from recipe.partial_rollout.worker.live_sample import LiveSample

_MOVE_ABOVE = 1.25
"""running samples of its own replica, over those of the emptiest, above which a resumed sample leaves its blocks behind"""


class ReplicaChoice:
    """Counts running samples by replica.

    A sample that has blocks cached at a replica (``LiveSample.replica``) goes back to it, unless it resumes after an
    interruption and that replica has fallen far behind; any other goes to the replica with the fewest running samples,
    in constant time: a round at scale starts with 100,000 choices.

    Args:
        servers: address to server handle.
        place: of this worker among all, from 0 to 1. Workers begin at different replicas: each has too few samples to
            reach all of many replicas, and together they shall.
    """

    def __init__(self, servers: dict[str, Any], place: float = 0.0) -> None:
        self._servers = dict(servers)
        addresses = list(servers)
        first = int(place * len(addresses))
        self._running = dict.fromkeys(addresses[first:] + addresses[:first], 0)
        self._with: dict[int, dict[str, None]] = {0: dict.fromkeys(self._running)}
        """addresses by their running samples; of equals, the one that has been so for longest comes first"""
        self._fewest = 0

    def take(self, sample: LiveSample) -> tuple[str, Any]:
        """Address and handle for the next call of ``sample``, which counts as running there until ``release``."""
        own = sample.replica if sample.replica in self._running else None
        if own is None or (sample.resumes and self._running[own] > _MOVE_ABOVE * (self._fewest + 1)):
            own = next(iter(self._with[self._fewest]))
        sample.replica, sample.resumes = own, False
        self._move(own, self._running[own] + 1)
        return own, self._servers[own]

    def release(self, address: str) -> None:
        """A call at ``address`` has ended."""
        if address in self._running:
            self._move(address, self._running[address] - 1)

    def leave(self, sample: LiveSample) -> bool:
        """The replica of ``sample`` is dead; whether any other is left."""
        if sample.replica is None:
            return False
        if sample.replica in self._running:
            self._withdraw(sample.replica, self._running.pop(sample.replica))
            self._fewest = min(self._with, default=0)
        sample.replica = None
        return bool(self._running)

    def _move(self, address: str, running: int) -> None:
        before, self._running[address] = self._running[address], running
        self._withdraw(address, before)
        self._with.setdefault(running, {})[address] = None
        # By one call at a time: whatever leaves the fewest behind goes to the next number.
        if running < self._fewest or self._fewest not in self._with:
            self._fewest = running

    def _withdraw(self, address: str, running: int) -> None:
        del self._with[running][address]
        if not self._with[running]:
            del self._with[running]
