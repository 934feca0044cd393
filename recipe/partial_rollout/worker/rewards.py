"""Reward calls: so many at once, on whichever of verl's reward workers lives, each within its deadline.

``Places`` is back-pressure on any kind of call that leaves a worker: no clock runs for those that queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from verl.protocol import DataProto

from recipe.partial_rollout.waits import AGAIN_S, means_death, one_line, result_of
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE

logger = logging.getLogger(__name__)

_ANSWERS_WITHIN_S = 5.0
"""seconds that a reward worker has to show that its event loop runs"""
REWARD_INFO = "reward_extra_info"
"""verl's name for what a reward says beside the score"""


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


class RewardError(RuntimeError):
    """The reward function failed, gave no score in time, or none that can be trained."""

    times = 1
    """in a row, for the same output"""


class RewardWorkersLostError(RuntimeError):
    """No reward worker answers any more."""


class RewardWorkers:
    """Stands for an actor handle in verl's ``reward_loop_worker_handles``: calls of a worker that is away go to the others.

    verl picks one at random for each sample; those on a dead node would fail it, and in the end mask it. A worker whose
    function never returns is ended, and Ray starts it anew (``verl_ext.reward_workers``): other samples wait behind it.

    Args:
        handles: verl's reward workers.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self.compute_score = self
        self._living = list(handles)
        self._died_of: RayActorError | None = None
        """the first death: a reward file that does not load ends all of them alike"""
        self._looking: set[asyncio.Task[None]] = set()

    async def remote(self, data: DataProto) -> dict:
        """``RewardLoopWorker.compute_score`` on one of those that live; the caller sets the deadline.

        Raises:
            RewardWorkersLostError: all are dead.
        """
        lost: RayActorError | None = None
        while self._living:
            for handle in random.sample(self._living, len(self._living)):
                call = handle.compute_score.remote(data)
                try:
                    return await call
                except asyncio.CancelledError:
                    # Its place goes to another call: it must not go on there.
                    ray.cancel(call)
                    looking = asyncio.create_task(self._end_if_stuck(handle))
                    self._looking.add(looking)
                    looking.add_done_callback(self._looking.discard)
                    raise
                except RayTaskError:
                    # The reward function's own error, which may be about an actor of its own.
                    raise
                except RayActorError as error:
                    lost = error
                    if means_death(error) and handle in self._living:
                        self._died_of = self._died_of or error
                        self._living.remove(handle)
            await asyncio.sleep(AGAIN_S)
        lost = self._died_of or lost
        raise RewardWorkersLostError(f"no reward worker answers (reward.num_workers): {one_line(lost)}") from lost

    async def _end_if_stuck(self, handle: Any) -> None:
        """End the worker of a call that was given up, unless the call ended with that, as a coroutine does."""
        try:
            stuck = await asyncio.wait_for(result_of(handle.__ray_call__.remote(_runs_in_threads)), _ANSWERS_WITHIN_S)
        except TimeoutError:
            stuck = True
        except RayActorError:
            return
        if stuck:
            logger.warning("a reward function does not return: its reward worker is ended, and starts anew")
            ray.kill(handle, no_restart=False)


def _runs_in_threads(worker: Any) -> bool:
    """Whether ``worker``'s reward function is synchronous: its thread goes on when the call is cancelled."""
    return not getattr(worker.reward_manager, "is_async_reward_score", False)
