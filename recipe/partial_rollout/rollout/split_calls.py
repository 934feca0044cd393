"""The workers' engine calls where training samples run beside validation: each asker gets its own."""

from __future__ import annotations

from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.rollout.supervision import Supervision
from recipe.partial_rollout.rollout.worker_pool import WorkerPool
from recipe.partial_rollout.waits import within


class SplitCalls:
    """Engine calls that ended, taken once.

    Args:
        pool: the agent-loop workers.
        supervision: of the workers.
        deadline_s: seconds for all of them to answer.
    """

    def __init__(self, pool: WorkerPool, supervision: Supervision, deadline_s: float) -> None:
        self._pool = pool
        self._supervision = supervision
        self._deadline_s = deadline_s
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
        what = "asking the agent-loop workers for their engine calls"
        asked = within(self._pool.take_calls(), self._deadline_s, what, "interrupt_s")
        for call in await self._supervision.during(asked, what):
            (self._training if _trains(call) else self._others).append(call)


def _trains(call: EngineCall) -> bool:
    """Whether ``call`` is of a training sample, whose id is ``epoch/position#index``."""
    return "#" in call.sample
