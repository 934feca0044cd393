"""Weight sync with deadlines, which notices the failure of a replica during the sync.

A replica that is dead before the sync is restarted for it (PR); one that dies during it ends the run. How the weights
travel is the backend's ``WeightTransfer``, what else PR does around a sync is the driver's::

    transfer.stage -> driver.before_load -> transfer.load -> driver.after_load
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.ray_utils import auto_await

from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.training.weight_transfer import transfer_of


class RecipeCheckpointManager:
    """Stands in for verl's manager in its ``fit``.

    Args:
        verls: the checkpoint manager that verl made.
        deadline_s: seconds that each part of a sync may take.
        driver: None under noPR.
        note: called after each sync with its version, start and end (unix seconds).
    """

    def __init__(
        self,
        verls: CheckpointEngineManager,
        deadline_s: float,
        driver: Driver | None,
        note: Callable[[int, float, float], None] | None = None,
    ) -> None:
        self._verls = verls
        self._transfer = transfer_of(verls, deadline_s)
        self._driver = driver
        self._note = note

    @auto_await
    async def sleep_replicas(self) -> None:
        """As verl's, which calls it when it has a batch; a dead replica is left out (PR)."""
        await (self._verls.sleep_replicas() if self._driver is None else self._driver.sleep())

    @auto_await
    async def wake_up_replicas(self) -> None:
        """As verl's; a dead replica is left out (PR)."""
        await (self._verls.wake_up_replicas() if self._driver is None else self._driver.wake_up())

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Send the trainer's weights to every replica as policy version ``global_steps``.

        Raises:
            WeightSyncError: a replica or the trainer failed, or the deadline passed; the message names it.
        """
        start = time.time()
        sent = await self._send(global_steps)
        if self._note is not None:
            self._note(global_steps or 0, start, time.time())
        return sent

    async def _send(self, version: int | None) -> dict[str, Any]:
        if self._driver is None and self._verls.backend != "naive":
            return await self._verls.update_weights(version)  # type: ignore[arg-type]
        version, start = version or 0, time.time()
        staged = await self._transfer.stage(version)
        if self._driver is not None:
            if staged:
                self._driver.note_phase("stage", version, start, time.time())
            await self._driver.before_load(version)
        await self._transfer.load(version)
        if self._driver is not None:
            await self._driver.after_load(version)
        return {}
