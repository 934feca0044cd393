"""The engine calls that ended, and how fast the engines decode when kept full, which efficiency is relative to."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.waits import result_of, within

if TYPE_CHECKING:
    from recipe.partial_rollout.rollout.context import RolloutContext

TakeCalls = Callable[[], Awaitable[tuple[EngineCall, ...]]]
"""returns engine calls that ended since it was last called"""


class EndedCalls:
    """The workers' engine calls that ended, each taken once: training samples may run beside validation.

    Args:
        ask: asks the workers for them (``Guard.ask``).
    """

    def __init__(self, ask: Callable[[str], Awaitable[list[list[EngineCall]]]]) -> None:
        self._ask = ask
        self._training: list[EngineCall] = []
        self._others: list[EngineCall] = []

    async def take_training(self) -> tuple[EngineCall, ...]:
        """Those of training samples since the last call."""
        await self._collect()
        taken, self._training = tuple(self._training), []
        return taken

    async def take_others(self) -> tuple[EngineCall, ...]:
        """Those of validation and of the probe since the last call."""
        await self._collect()
        taken, self._others = tuple(self._others), []
        return taken

    async def _collect(self) -> None:
        for calls in await self._ask("take_calls"):
            for call in calls:
                # The id of a training sample is ``epoch/position#index``.
                (self._training if "#" in call.sample else self._others).append(call)


class EngineProbe:
    """Runs samples through the whole path; they are not trained.

    Args:
        context: parts of the trainer.
        workers: handles of the agent-loop workers.
        take_calls: collects their engine calls.
    """

    def __init__(self, context: RolloutContext, workers: Sequence[Any], take_calls: TakeCalls) -> None:
        self._context = context
        self._workers = workers
        self._take_calls = take_calls
        self.full_tokens_per_s: float | None = None
        """tokens/s that the last probe measured; None before the first"""

    @property
    def concurrency(self) -> int:
        """Number of samples that keep the engines full."""
        return self._context.full_concurrency

    async def measure(self, rows: list[dict[str, Any]], seconds: float) -> float:
        """Keep the engines full for twice ``seconds``; decoded tokens per second of the second half.

        The engines are warmed up first: on a machine without caches an engine may compile for longer than the probe
        takes. In the first half the samples are younger than those of a round, and so cheaper to decode. All samples
        are thrown away; the probe trains nothing.
        """
        share = math.ceil(self.concurrency / len(self._workers))
        await within(
            asyncio.gather(*[result_of(w.warm_up.remote(rows, share)) for w in self._workers]),
            self._context.settings.deadlines.stall_s,
            "warming the engines up",
            "stall_s",
        )
        calls, end = await self._keep_full(rows, share, 2 * seconds)
        tokens = sum(call.tokens_within(end - seconds, end) for call in calls)
        self._context.trace.probe(end - seconds, end, round(tokens), share * len(self._workers))
        self.full_tokens_per_s = tokens / seconds
        return self.full_tokens_per_s

    async def _keep_full(
        self, rows: list[dict[str, Any]], share: int, seconds: float
    ) -> tuple[tuple[EngineCall, ...], float]:
        """Run ``share`` samples on each worker for ``seconds``; returns their calls, and when the engines were quiet."""
        workers, control = self._workers, self._context.control
        await self._take_calls()
        running = [asyncio.ensure_future(result_of(worker.probe.remote(rows, share))) for worker in workers]
        done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        reward_s = self._context.settings.deadlines.reward_s
        await within(
            asyncio.gather(*[result_of(w.end_probe.remote()) for w in workers]),
            reward_s,
            "ending the probe",
            "reward_s",
        )
        await control.interrupt()
        end = time.time()
        await within(asyncio.gather(*running), reward_s, "the last samples of the probe", "reward_s")
        await control.resume()
        # Preemptions during the probe belong to no round.
        await control.new_preemptions()
        return await self._take_calls(), end
