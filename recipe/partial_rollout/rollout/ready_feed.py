"""Gives the trainer the groups of a batch as they become ready, while it waits for the rest.

The groups stay ready: the batch is chosen once it is complete, and what was computed for a group outside it is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from ray.exceptions import RayActorError
from verl.protocol import DataProto

from recipe.partial_rollout.manager.output_store import OutputStore, fetch_groups
from recipe.partial_rollout.manager.types import FinishedOutput, TakenGroup
from recipe.partial_rollout.records.trace_events import PhaseName
from recipe.partial_rollout.rollout.batch import assemble_batch
from recipe.partial_rollout.waits import one_line, result_of

if TYPE_CHECKING:
    from recipe.partial_rollout.rollout.rollout_context import RolloutContext


class Passes(Protocol):
    """What the trainer computes of groups that are ready."""

    least_groups: int
    """a run takes a multiple of this many"""

    def begin(self) -> None:
        """A batch is awaited: forget what the weights before gave."""
        ...

    def run(self, rows: DataProto) -> None:
        """Compute ``rows`` (the batch contract of ``rollout/batch.py``), and block meanwhile."""
        ...


class ReadyFeed:
    """Runs the trainer's passes beside a wait for its batch.

    Args:
        manager: handle of the manager actor.
        store: holds the outputs of finished samples.
    """

    def __init__(self, context: RolloutContext, manager: Any, store: OutputStore) -> None:
        self._context = context
        self._manager = manager
        self._store = store
        self._running: asyncio.Future[None] | None = None
        """the passes that the trainer runs now"""

    @asynccontextmanager
    async def during(self, step: int) -> AsyncIterator[None]:
        """In the body the batch of ``step`` is awaited and taken. The trainer is idle again after it.

        Raises:
            TrainerLostError: a trainer died in a pass.
        """
        passes = self._context.early_passes
        if passes is None:
            yield
            return
        passes.begin()
        feeding = asyncio.ensure_future(self._feed(passes, step))
        try:
            yield
        except BaseException:
            with suppress(Exception):
                await self._settled(feeding)
            raise
        await self._settled(feeding)

    async def _feed(self, passes: Passes, step: int) -> None:
        try:
            await self._fed(passes, step)
        except Exception as error:
            # Whoever waits for the batch learns of it now, and not once the batch is complete.
            with suppress(RayActorError):
                await self._manager.abandon.remote(f"a forward pass over ready groups failed: {one_line(error)}")
            raise

    async def _fed(self, passes: Passes, step: int) -> None:
        known: list[str] = []
        while True:
            ready = await result_of(self._manager.ready_groups.remote(known, passes.least_groups))
            if ready is None:
                return
            ready = ready[: len(ready) - len(ready) % passes.least_groups]
            if ready:
                self._running = asyncio.ensure_future(self._run(passes, step, ready))
                # The wait may be over before the trainer is: it cannot be interrupted in a pass.
                await asyncio.shield(self._running)
                known += [group.uid for group in ready]

    async def _run(self, passes: Passes, step: int, ready: Sequence[TakenGroup[FinishedOutput]]) -> None:
        began = time.time()
        await asyncio.to_thread(lambda: passes.run(self._rows(ready)))
        self._context.trace.phase(PhaseName.EARLY_PASS, step, began, time.time())

    def _rows(self, ready: Sequence[TakenGroup[FinishedOutput]]) -> DataProto:
        groups, sizes = fetch_groups(ready, self._store.fetch), self._context.sizes
        uids = [group.uid for group in groups]
        return assemble_batch(groups, uids, sizes.prompt, sizes.response, self._context.pad_id)

    async def _settled(self, feeding: asyncio.Future[None]) -> None:
        """Ask for no more groups, and wait for the pass that runs; raises what either raised."""
        feeding.cancel()
        running, self._running = self._running, None
        try:
            if running is not None:
                await self._context.trainers.alive_during(running, "a forward pass over ready groups")
        finally:
            (ended,) = await asyncio.gather(feeding, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended
