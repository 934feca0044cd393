"""The vLLM replicas: interrupted, held, resumed and restarted.

Interruption is ``abort_all_requests`` on all replicas at once: each closes its gate, aborts what runs (the partial
tokens come back to the callers), waits until the engine is quiet and drops the caches of the old weights. Requests that
still arrive are refused, not parked, so nothing of a round is queued at a replica between rounds.

A hold freezes the requests in the engines instead, and they go on with the resumption (``engine/hold``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from recipe.partial_rollout.waits import START_S, InfraError, answer_of, means_death, one_line, result_of, wait

ReplicaLoad = dict[str, tuple[int, int]]
"""address of a replica to the requests that it runs and the tokens decoded since its start"""

logger = logging.getLogger(__name__)


class ServerControl:
    """Interrupts, holds, resumes and restarts a set of replicas.

    A replica whose death a request to all of them notices is left out from then on. Each worker moves its samples to the
    others. ``restart_dead`` brings it back before the next weight sync, which gives it the
    trainer's weights. So every request to all replicas must go through here, including those of verl's ``fit``.

    Args:
        replicas: as ``engine/replica`` makes them.
        deadline_s: seconds for any request to all of them.
        restarts: replica restarts allowed over the whole run.
    """

    def __init__(self, replicas: Sequence[Any], deadline_s: float, restarts: int = 0) -> None:
        self._replicas = list(replicas)
        self._dead: list[Any] = []
        self._deadline_s = deadline_s
        self._restarts = restarts
        self._preemptions: dict[str, int] = {}
        self.restarted = 0
        """replicas restarted since the start of the run"""

    @property
    def addresses(self) -> list[str]:
        """Server ids, in replica order."""
        return [replica.server_address for replica in self._replicas]

    @property
    def servers(self) -> dict[str, Any]:
        """Address to server handle of the living replicas."""
        return {replica.server_address: replica.server_handle for replica in self._living}

    @property
    def _living(self) -> list[Any]:
        return [replica for replica in self._replicas if replica not in self._dead]

    async def interrupt(self) -> None:
        """Abort every running request; afterwards all replicas are quiet.

        Raises:
            InfraError: no replica is alive; so do the others.
        """
        await self._all("interrupting", lambda replica: replica.abort_all_requests(reject_request=True))

    async def hold(self) -> None:
        """Freeze every running request; afterwards all engines stand still."""
        await self._all("holding", lambda replica: replica.hold_generation())

    async def resume(self) -> None:
        """Let the replicas accept requests, and go on with those that are held."""
        await self._all("resuming", lambda replica: replica.resume_generation())

    async def sleep(self) -> None:
        """Let the replicas release device memory, if they are configured to."""
        await self._all("putting to sleep", lambda replica: replica.sleep())

    async def load(self) -> ReplicaLoad:
        """Requests and decoded tokens of the replicas that answer.

        The death of another is noticed at the next request that must succeed, an interruption at the latest.
        """
        answers = await self._answers("asking for load of", _asking("load"))
        return {
            replica.server_address: load for replica, load in answers.items() if not isinstance(load, BaseException)
        }

    async def kv_tokens(self) -> int | None:
        """Tokens that the smallest KV cache of all replicas holds; None if a replica does not say."""
        known = await self._all("asking for kv_tokens of", _asking("kv_tokens"))
        return None if None in known.values() else min(known.values(), default=None)

    async def new_preemptions(self) -> int | None:
        """Requests that the replicas preempted for lack of KV blocks since the last call; None if they are not counted."""
        counts = await self._all("asking for preemptions of", _asking("preemptions"))
        if not counts or None in counts.values():
            return None
        new = sum(count - self._preemptions.get(address, 0) for address, count in counts.items())
        self._preemptions |= counts
        return new

    async def restart_dead(self) -> None:
        """Restart the dead replicas, under new addresses and without the trainer's weights.

        A replica may have died since its last answer, so all are asked first.

        Raises:
            InfraError: one died once too often, or none is alive.
        """
        await self._all("looking after", lambda replica: replica.check_alive())
        dead, self._dead = self._dead, []
        for replica in dead:
            address = replica.server_address
            if self.restarted >= self._restarts:
                raise InfraError(
                    f"vLLM replica {address} is dead and is not restarted again "
                    f"(partial_rollout.failures.replica_restarts={self._restarts})"
                )
            self.restarted += 1
            await wait(replica.relaunch(), START_S, f"restarting {address}")
            logger.warning("vLLM replica %s is back as %s", address, replica.server_address)

    async def _all(self, what: str, ask: Callable[[Any], Awaitable[Any]]) -> dict[str, Any]:
        """Ask every living replica; those that die of it are left out from then on. The others' answers by address."""
        found: dict[str, Any] = {}
        for replica, answer in (await self._answers(what, ask)).items():
            if not isinstance(answer, BaseException):
                found[replica.server_address] = answer
            elif means_death(answer):
                self._dead.append(replica)
                logger.warning("vLLM replica %s died: %s", replica.server_address, one_line(answer))
            else:
                raise answer
        if not self._living:
            raise InfraError(f"no vLLM replica is alive ({', '.join(self.addresses)})")
        return found

    async def _answers(self, what: str, ask: Callable[[Any], Awaitable[Any]]) -> dict[Any, Any]:
        """The answer of each living replica, or the error in its place; all are asked at once."""

        async def answer(replica: Any) -> Any:
            named = f"{what} vLLM replica {replica.server_address}"
            return await wait(answer_of(lambda: ask(replica)), self._deadline_s, named, "interrupt_s")

        living = self._living
        answers = await asyncio.gather(*map(answer, living), return_exceptions=True)
        return dict(zip(living, answers, strict=True))


def _asking(verb: str) -> Callable[[Any], Awaitable[Any]]:
    """Return what asks a replica's server ``verb``."""
    return lambda replica: result_of(getattr(replica.server_handle, verb).remote())


def decoded_between(before: ReplicaLoad, after: ReplicaLoad) -> int:
    """Tokens that the replicas decoded between two answers; one that died or came back in between counts as 0.

    >>> decoded_between({"a": (3, 100), "b": (3, 900)}, {"a": (2, 160), "c": (4, 10)})
    60
    """
    return sum(max(0, tokens - before[address][1]) for address, (_, tokens) in after.items() if address in before)
