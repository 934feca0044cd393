"""Back-pressure on calls that leave a worker: so many run at once, and the others queue, in which no call's clock runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE


class Places:
    """Places for calls of one kind; whoever comes first gets the next one.

    Args:
        most: calls at once; None: no limit.
    """

    def __init__(self, most: int | None) -> None:
        self._free = None if most is None else asyncio.Semaphore(most)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Entered once a place is free, and held until left; deadlines of the call belong inside."""
        if self._free is None:
            yield
            return
        sample = LIVE_SAMPLE.get()
        with contextlib.nullcontext() if sample is None else sample.clock.stopped():
            await self._free.acquire()
        try:
            yield
        finally:
            self._free.release()
