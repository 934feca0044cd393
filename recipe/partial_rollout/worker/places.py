"""Back-pressure on calls that leave a worker: so many run at once, and no clock runs for those that queue."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import ray

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


def reward_places(config: Any) -> int | None:
    """Reward calls that each agent-loop worker may make at once under the whole ``config``; None: any number.

    Workers share the cores of all nodes: verl spreads its reward workers over them, and each call goes to any of them.
    """
    given = config.partial_rollout.reward_concurrency
    if given is not None or config.reward.reward_model.enable or config.reward.sandbox_fusion.url:
        return given
    # Ray's count of a node may be above what is there (``ray_init.num_cpus``), or below it (a container's quota).
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    cores = sum(min(count, len(os.sched_getaffinity(0))) for count in nodes)
    return max(1, cores // config.actor_rollout_ref.rollout.agent.num_workers)
