"""verl's reward workers, called like one: a dead one's calls go to the others.

verl spreads them over the nodes and picks one at random for each sample. A node's reward workers die with it, and samples
that pick one would fail, be retried, and in the end be masked.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from verl.protocol import DataProto

from recipe.partial_rollout.waits import means_death, one_line


class RewardWorkersLostError(RuntimeError):
    """No reward worker answers any more."""


class RewardWorkers:
    """Stands for an actor handle in verl's ``reward_loop_worker_handles``.

    Args:
        handles: verl's reward workers.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self.compute_score = self
        self._living = list(handles)

    async def remote(self, data: DataProto) -> dict:
        """``RewardLoopWorker.compute_score`` on one of those that live.

        Raises:
            RewardWorkersLostError: none of them answers.
        """
        lost: RayActorError | None = None
        for handle in random.sample(self._living, len(self._living)):
            call = handle.compute_score.remote(data)
            try:
                return await call
            except asyncio.CancelledError:
                # Its place goes to another call: it must not go on there.
                ray.cancel(call)
                raise
            except RayTaskError:
                # The reward function's own error, which may be about an actor of its own.
                raise
            except RayActorError as error:
                lost = error
                if means_death(error) and handle in self._living:
                    self._living.remove(handle)
        raise RewardWorkersLostError(
            f"no reward worker answers (reward.num_workers): {one_line(lost) if lost else 'all have died'}"
        ) from lost
