"""The workers' engine calls where training samples run beside validation: each asker gets its own."""

from __future__ import annotations

from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.worker_pool import WorkerPool


class SplitCalls:
    """Engine calls that ended, taken once.

    Args:
        pool: the agent-loop workers.
        guard: of the driver's waits.
    """

    def __init__(self, pool: WorkerPool, guard: Guard) -> None:
        self._pool = pool
        self._guard = guard
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
        for call in await self._guard.wait(self._pool.take_calls(), "collecting the engine calls", key=None):
            (self._training if _trains(call) else self._others).append(call)


def _trains(call: EngineCall) -> bool:
    """Whether ``call`` is of a training sample, whose id is ``epoch/position#index``."""
    return "#" in call.sample
