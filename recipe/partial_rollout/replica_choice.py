"""Which replica an engine call of a training sample goes to: balanced by running samples, of this worker alone."""

from __future__ import annotations

from typing import Any

from recipe.partial_rollout.live_sample import LiveSample

_MOVE_ABOVE = 1.25
"""running samples of its own replica, over those of the emptiest, above which a resumed sample leaves its blocks behind"""


class ReplicaChoice:
    """Counts running samples by replica.

    A sample that has blocks cached at a replica (``LiveSample.replica``) goes back to it, unless it resumes after an
    interruption and that replica has fallen far behind; any other goes to the replica with the fewest running samples.

    Args:
        servers: address to server handle.
    """

    def __init__(self, servers: dict[str, Any]) -> None:
        self._servers = dict(servers)
        self._running = dict.fromkeys(servers, 0)

    def take(self, sample: LiveSample) -> tuple[str, Any]:
        """Address and handle for the next call of ``sample``, which counts as running there until ``release``."""
        fewest = min(self._running, key=self._running.__getitem__)
        own = sample.replica if sample.replica in self._running else None
        if own is None or (sample.resumes and self._running[own] > _MOVE_ABOVE * (self._running[fewest] + 1)):
            own = fewest
        sample.replica, sample.resumes = own, False
        self._running[own] += 1
        return own, self._servers[own]

    def release(self, address: str) -> None:
        """A call at ``address`` has ended."""
        if address in self._running:
            self._running[address] -= 1

    def leave(self, sample: LiveSample) -> bool:
        """The replica of ``sample`` is dead; whether any other is left."""
        if sample.replica is None:
            return False
        self._running.pop(sample.replica, None)
        sample.replica = None
        return bool(self._running)
