"""Interrupting and resuming the vLLM replicas around a weight sync.

Interruption is ``abort_all_requests`` on all replicas at once: each closes its gate, aborts what runs (the partial
tokens come back to the callers), waits until the engine is quiet and drops the caches of the old weights. Requests that
still arrive are refused, not parked, so nothing of a round is queued at a replica between rounds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from verl.workers.rollout.replica import RolloutReplica

T = TypeVar("T")


async def within(awaitable: Awaitable[T], deadline_s: float, what: str, key: str) -> T:
    """``awaitable``'s result.

    Raises:
        TimeoutError: nothing within ``deadline_s``; names ``what`` was awaited and the config ``key`` of the deadline.
    """
    try:
        return await asyncio.wait_for(awaitable, deadline_s)
    except TimeoutError as error:
        raise TimeoutError(f"{what} took more than {deadline_s:g} s (partial_rollout.deadlines.{key})") from error


class ServerControl:
    """Interrupts and resumes a set of replicas.

    Args:
        replicas: verl's rollout replicas.
        deadline_s: seconds for either operation.
    """

    def __init__(self, replicas: Sequence[RolloutReplica], deadline_s: float) -> None:
        self._replicas = list(replicas)
        self._deadline_s = deadline_s

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def addresses(self) -> list[str]:
        """Server ids as the load balancer knows them."""
        return [replica.server_address for replica in self._replicas]

    @property
    def servers(self) -> dict[str, Any]:
        """Address to server handle."""
        return {replica.server_address: replica.server_handle for replica in self._replicas}

    async def interrupt(self) -> float:
        """Abort every running request; returns the seconds until all replicas were quiet."""
        return await self._all("interrupting", [r.abort_all_requests(reject_request=True) for r in self._replicas])

    async def resume(self) -> float:
        """Let the replicas take requests again; returns the seconds it took."""
        return await self._all("resuming", [r.resume_generation() for r in self._replicas])

    async def _all(self, what: str, calls: list[Awaitable[object]]) -> float:
        start = time.monotonic()
        await within(
            asyncio.gather(*calls),
            self._deadline_s,
            f"{what} the vLLM replicas {', '.join(self.addresses)}",
            "interrupt_s",
        )
        return time.monotonic() - start
