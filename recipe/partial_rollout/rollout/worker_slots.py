"""Slots of an agent-loop worker: its share of the replicas' slots, also kept up to date in the manager."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.rollout.rollout_context import RolloutContext
from recipe.partial_rollout.waits import within


class WorkerSlots:
    """Follows the replicas' slots from round to round.

    Args:
        context: parts of the trainer.
        workers: number of workers that share the replicas' slots.
        manager: handle of the manager actor.
    """

    def __init__(self, context: RolloutContext, workers: int, manager: Any) -> None:
        self._context = context
        self._workers = workers
        self._manager = manager
        self.per_worker = self._part()

    def _part(self) -> int:
        return math.ceil(self._context.slots.per_replica * len(self._context.control) / self._workers)

    async def reckon(self, calls: Iterable[EngineCall]) -> None:
        """Adjust the slots after the round that made ``calls``; samples already granted keep their slots."""
        self._context.reckon_slots(calls)
        if self.per_worker != self._part():
            self.per_worker = self._part()
            resizing = self._manager.resize_workers.remote(self.per_worker)
            deadline_s = self._context.settings.deadlines.interrupt_s
            await within(resizing, deadline_s, "telling the manager of the workers' slots", "interrupt_s")
