"""Weight sync with a deadline, which notices the failure of a replica during the sync.

A replica that is dead before the sync is restarted for it (PR); one that dies during it ends the run. What else PR does
around a sync is its placement's ``SyncFrame``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError, RayError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.ray_utils import auto_await

from recipe.partial_rollout.rollout.sync_frame import SyncFrame
from recipe.partial_rollout.waits import one_line

_LOOK_EVERY_S = 1.0
"""interval at which replicas are asked whether the sync failed on their side; a sync that succeeds never waits for it"""


class WeightSyncError(RuntimeError):
    """New weights did not reach the replicas."""


class RecipeCheckpointManager:
    """Stands in for verl's manager in its ``fit``.

    Args:
        verls: the checkpoint manager that verl made.
        deadline_s: seconds that one sync may take.
        frame: what PR does around a sync; None under noPR.
        note: called after each sync with its version, start and end (unix seconds).
    """

    def __init__(
        self,
        verls: CheckpointEngineManager,
        deadline_s: float,
        frame: SyncFrame | None,
        note: Callable[[int, float, float], None] | None = None,
    ) -> None:
        self._verls = verls
        self._deadline_s = deadline_s
        self._frame = frame
        self._note = note

    @auto_await
    async def sleep_replicas(self) -> None:
        """As verl's, which calls it when it has a batch; a dead replica is left out (PR)."""
        await (self._verls.sleep_replicas() if self._frame is None else self._frame.sleep())

    @auto_await
    async def wake_up_replicas(self) -> None:
        """As verl's; a dead replica is left out (PR)."""
        await (self._verls.wake_up_replicas() if self._frame is None else self._frame.wake_up())

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

    async def _send(self, global_steps: int | None) -> dict[str, Any]:
        if self._verls.backend != "naive":
            return await self._verls.update_weights(global_steps)  # type: ignore[arg-type]
        if self._frame is not None:
            await self._frame.before(global_steps or 0)
        trainer: Any = self._verls.actor_wg
        refs = trainer.update_weights(global_steps=global_steps, mode=self._verls.backend)
        syncing = asyncio.ensure_future(_all(refs))
        started = time.monotonic()
        try:
            while not (await asyncio.wait({syncing}, timeout=_LOOK_EVERY_S))[0]:
                await self._look(time.monotonic() - started, global_steps)
            syncing.result()
        except RayError as error:
            raise WeightSyncError(
                f"weight sync of version {global_steps} failed in the trainer: {one_line(error)}"
            ) from error
        finally:
            syncing.cancel()
        if self._frame is not None:
            await self._frame.after(global_steps or 0)
        return {}

    async def _look(self, waited_s: float, version: int | None) -> None:
        for replica in self._verls.replicas:
            name = replica.server_address
            try:
                error = await asyncio.wait_for(_one(replica.server_handle.weight_sync_error.remote()), 10.0)
            except TimeoutError:
                error = None
            except RayActorError as died:
                error = f"the server died: {one_line(died)}"
            if error is not None:
                raise WeightSyncError(f"weight sync of version {version} failed in vLLM replica {name}: {error}")
        if waited_s > self._deadline_s:
            names = ", ".join(replica.server_address for replica in self._verls.replicas)
            raise WeightSyncError(
                f"weight sync of version {version} to vLLM replicas {names} took more than {self._deadline_s:g} s "
                f"(partial_rollout.deadlines.weight_sync_s)"
            )


async def _one(ref: Any) -> Any:
    return await ref


async def _all(refs: list[Any]) -> list[Any]:
    return await asyncio.gather(*refs)
