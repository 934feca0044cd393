"""The engine calls that ended: those of training samples, and the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from recipe.partial_rollout.records.calls import EngineCall

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
        """Those of validation since the last call."""
        await self._collect()
        taken, self._others = tuple(self._others), []
        return taken

    async def _collect(self) -> None:
        for calls in await self._ask("take_calls"):
            for call in calls:
                # The id of a training sample is ``epoch/position#index``.
                (self._training if "#" in call.sample else self._others).append(call)
