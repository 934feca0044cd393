"""A wait during which the agent-loop workers are watched: a dead one is replaced, and its samples are requeued."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

from ray.exceptions import RayActorError

from recipe.partial_rollout.manager.messages import RolloutFailedError
from recipe.partial_rollout.rollout.worker_pool import WorkerPool
from recipe.partial_rollout.waits import one_line, result_of

T = TypeVar("T")


class Supervision:
    """Watches the workers during waits.

    Args:
        pool: the workers, connected to ``manager``.
        manager: handle of the manager actor.
    """

    def __init__(self, pool: WorkerPool, manager: Any) -> None:
        self._pool = pool
        self._manager = manager

    async def during(self, awaitable: Awaitable[T], what: str) -> T:
        """``awaitable``'s result.

        Args:
            what: names the wait in errors.

        Raises:
            RolloutFailedError: an actor other than a worker died.
            WorkerLostError: a worker failed, or died once too often.
        """
        try:
            return await self._pool.while_serving(
                awaitable, what, release=lambda name: result_of(self._manager.release_worker.remote(name))
            )
        except RayActorError as error:
            raise RolloutFailedError(f"an actor died during {what}: {one_line(error)}") from error
