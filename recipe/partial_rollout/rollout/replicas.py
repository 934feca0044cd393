"""The vLLM replicas: how many samples run on each, and how all are interrupted, held, resumed and restarted.

Interruption is ``abort_all_requests`` on all replicas at once: each closes its gate, aborts what runs (the partial
tokens come back to the callers), waits until the engine is quiet and drops the caches of the old weights. Requests that
still arrive are refused, not parked, so nothing of a round is queued at a replica between rounds.

A hold freezes the requests in the engines instead; ``resume`` lets them go on (``engine/hold``).

A replica runs no more samples at once than it has seats, and no more than its KV cache holds.

Slots beyond the KV cache do not speed a replica up: vLLM preempts the samples that were dispatched last and prefills
their contexts again and again. In the planner's simulation (Qwen3-4B on H20, 32 groups of 8 a step, 512 in flight on one
replica; lognormal lengths with median 3,000, mean 3,600, cap 18,384) 512 slots cost 1,154 preemptions a round and reach
2,362 tokens/s. The rule below has 22 preemptions and reaches 2,772 tokens/s; the best fixed number of slots reaches
2,743. With lengths near their cap (mean 6,800 of 8,192) 512 slots have 1,364 preemptions and 2,155 tokens/s, the rule
29 and 2,476.

The rule: in the first round a sample counts as ``prompt_length + response_length / 2`` tokens, its mean context if all
samples reach their cap. This estimate for the whole run would cost a quarter of the speed if lengths have a tail
(2,119 tokens/s). So after the first round a sample counts as the mean context measured while decoding, and the slots
fill ``KV_SHARE`` of the cache: of .7, .8 and .9 the largest without many preemptions (.9: 144 a round, no faster).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.terminal import say
from recipe.partial_rollout.waits import START_S, InfraError, answer_of, means_death, one_line, result_of, wait

ReplicaLoad = dict[str, tuple[int, int]]
"""address of a replica to the requests that it runs and the tokens decoded since its start"""

KV_SHARE = 0.8
"""share of the KV cache that samples of the measured mean context fill; the rest is for their spread"""
_NOTABLE = 0.05
"""smallest change of the slots that is made, as a share"""

logger = logging.getLogger(__name__)


class ServerControl:
    """Interrupts, holds, resumes and restarts a set of replicas.

    A replica that a request finds dead is left out from then on, and each worker moves its samples to the others.
    ``restart_dead`` brings the replica back before the next weight sync, which gives it the trainer's weights. So every
    request to all replicas must go through here, including those of verl's ``fit``.

    Args:
        replicas: as ``engine/replica`` makes them.
        deadline_s: seconds that a replica has to answer any request except a restart.
        restarts: replica restarts allowed in this process; a resumed run counts from 0.
    """

    def __init__(self, replicas: Sequence[Any], deadline_s: float, restarts: int = 0) -> None:
        self._replicas = list(replicas)
        self._dead: list[Any] = []
        self._deadline_s = deadline_s
        self._restarts = restarts
        self._preemptions: dict[str, int] = {}
        self.restarted = 0
        """replicas restarted since this process started; a resumed run counts from 0"""

    @property
    def addresses(self) -> list[str]:
        """Addresses of all replicas, dead ones included, in replica order."""
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
            InfraError: no replica is alive. Every other request except ``load`` raises it too.
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
        """Return the requests and decoded tokens of each replica that answers, by its address.

        A replica that does not answer is left out. If it is dead, the next call that needs every replica finds out, at
        the latest the interruption at the end of the round.
        """
        answers = await self._answers("asking for load of", _asking("load"))
        return {
            replica.server_address: load for replica, load in answers.items() if not isinstance(load, BaseException)
        }

    async def kv_tokens(self) -> int | None:
        """Return the capacity, in tokens, of the smallest KV cache; None if a replica does not know its own."""
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
            InfraError: a replica is dead and ``failures.replica_restarts`` is used up, or none is alive.
        """
        await self._all("checking the health of", lambda replica: replica.check_alive())
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
        """Return the answers of all living replicas by address. One that turns out dead is left out from then on."""
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
        """Ask all living replicas at once, and return the answer of each, or its error."""

        async def answer(replica: Any) -> Any:
            named = f"{what} vLLM replica {replica.server_address}"
            return await wait(answer_of(lambda: ask(replica)), self._deadline_s, named, "interrupt_s")

        living = self._living
        # All have answered before any is judged: one that fails must not leave the others half interrupted.
        answers = await asyncio.gather(*map(answer, living), return_exceptions=True)
        return dict(zip(living, answers, strict=True))


def _asking(verb: str) -> Callable[[Any], Awaitable[Any]]:
    """Return a function that calls the method ``verb`` of a replica's server."""
    return lambda replica: result_of(getattr(replica.server_handle, verb).remote())


def decoded_between(before: ReplicaLoad, after: ReplicaLoad) -> int:
    """Tokens that the replicas decoded between two answers; one that died or came back in between counts as 0.

    >>> decoded_between({"a": (3, 100), "b": (3, 900)}, {"a": (2, 160), "c": (4, 10)})
    60
    """
    return sum(max(0, tokens - before[address][1]) for address, (_, tokens) in after.items() if address in before)


class ReplicaSlots:
    """Number of slots of each replica.

    It follows the measured lengths from round to round. It is fixed if the user gave it, or if the size of the KV cache
    is unknown.

    Args:
        most: the number itself (``partial_rollout.slots_per_replica``) if ``given``, else its upper bound
            (``rollout.max_num_seqs``).
        given: whether the user gave the number.
        kv_tokens: tokens that the smallest KV cache of all replicas holds; None if unknown.
        prompt, response: largest lengths that the configuration allows, in tokens.
        replicas: number of replicas.
    """

    def __init__(
        self, most: int, *, given: bool, kv_tokens: int | None, prompt: int, response: int, replicas: int = 1
    ) -> None:
        self._most, self._given, self._kv_tokens = most, given, kv_tokens
        self._prompt, self._response, self._replicas = prompt, response, replicas
        self._guess = prompt + -(-response // 2)
        """tokens that a sample holds on average if it reaches its cap"""
        self.per_replica = most if given or kv_tokens is None else self._that_fit(self._guess)

    def _that_fit(self, tokens: float) -> int:
        assert self._kv_tokens is not None
        # At least one, however small the cache: vLLM itself refuses a cache that holds no request.
        return min(self._most, max(1, int(self._kv_tokens / tokens)))

    @property
    def total(self) -> int:
        """Slots of all replicas."""
        return self.per_replica * self._replicas

    def of_a_worker(self, workers: int) -> int:
        """Return the slots of each worker if ``workers`` of them share all slots equally, rounded up."""
        return math.ceil(self.total / workers)

    def describe(self) -> str:
        """One line: what was chosen before the first round, and why."""
        bound = "partial_rollout.slots_per_replica" if self._given else f"at most rollout.max_num_seqs={self._most}"
        holds = "an unknown number of" if self._kv_tokens is None else f"{self._kv_tokens:,}"
        return (
            f"slots per replica: {self.per_replica} ({bound}; the KV cache holds {holds} tokens, a sample is estimated at "
            f"{self._guess:,} = prompt_length {self._prompt:,} + response_length {self._response:,} / 2)"
        )

    def update(self, calls: Iterable[EngineCall]) -> bool:
        """Adjust the number of slots to the engine calls of a step. Print a line and return True if it changed."""
        if self._given or self._kv_tokens is None:
            return False
        decoded = [(call.tokens, call.context_tokens + call.tokens / 2) for call in calls if call.context_tokens]
        tokens = sum(count for count, _ in decoded)
        if not tokens:
            return False
        # Weighted by tokens, not by calls: a long call fills the cache for longer.
        mean = sum(count * context for count, context in decoded) / tokens
        fit = self._that_fit(mean / KV_SHARE)
        if abs(fit - self.per_replica) < max(1, _NOTABLE * self.per_replica):
            return False
        self.per_replica = fit
        say(
            f"slots per replica: {fit} from here on (samples held {mean:,.0f} tokens on average while decoding, the KV "
            f"cache holds {self._kv_tokens:,}; rollout.max_num_seqs={self._most})"
        )
        return True
