"""The guard: the way in which the driver waits for the manager, the replicas and the agent-loop workers.

Whatever it waits for, it watches the workers' ``serve`` calls: a worker that dies is replaced, and its samples are
requeued. A wait for the batch, which may take an hour, is watched by more, and whatever happens first ends it::

    a trainer dies | the user's stop | the manager does not answer | a worker does not answer | engines and samples stall

A worker that does not answer in time is ended, and replaced like one that died. Guarded waits do not nest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ray.exceptions import RayActorError

from recipe.partial_rollout.manager.types import RolloutFailedError
from recipe.partial_rollout.rollout.replicas import Load, decoded_between
from recipe.partial_rollout.waits import answer_of, one_line, result_of, wait, whole

if TYPE_CHECKING:
    from recipe.partial_rollout.rollout.session import RunSession
    from recipe.partial_rollout.rollout.workers import WorkerPool

T = TypeVar("T")

LOOK_EVERY_S = 2.0
"""seconds between two questions to manager, workers and trainers during a wait for the batch"""
ASKED_IN_A_STALL = 4
"""times that the engines are asked within ``stall_s``; a stall is noticed at most ``stall_s`` over this number late"""


class TrainerLostError(RuntimeError):
    """A trainer died; the message names it."""


class Guard:
    """Waits, with deadlines.

    Args:
        session: of the run.
        manager: handle of the manager actor.
        pool: the agent-loop workers, connected to ``manager``.
    """

    def __init__(self, session: RunSession, manager: Any, pool: WorkerPool) -> None:
        self._session = session
        self._deadlines = session.settings.deadlines
        self._manager = manager
        self._pool = pool

    async def wait(
        self,
        awaitable: Awaitable[T],
        what: str,
        key: str | None = "interrupt_s",
        watches: Iterable[Coroutine[Any, Any, Any]] = (),
    ) -> T:
        """``awaitable``'s result.

        Args:
            what: names the wait in errors.
            key: of ``partial_rollout.deadlines``; None: what is awaited has deadlines of its own.
            watches: see ``waits.wait``.

        Raises:
            TimeoutError: no result in time.
            RolloutFailedError: an actor other than a worker died.
            WorkerLostError: a worker failed, or was lost once too often.
        """
        deadline_s = None if key is None else getattr(self._deadlines, key)
        try:
            return await wait(awaitable, deadline_s, what, key, watches=(self._watch_workers(what), *watches))
        except RayActorError as error:
            raise RolloutFailedError(f"an actor died during {what}: {one_line(error)}") from error

    async def wait_batch(self, batch: Awaitable[T], *watches: Coroutine[Any, Any, Any]) -> T:
        """The manager's answer about the batch.

        Args:
            watches: go on beside it, as in ``waits.wait``.

        Raises:
            RolloutFailedError: a sample, replica, reward function or the manager failed; the message names it.
            WorkerLostError: a worker failed, or was lost once too often.
            TrainerLostError: a trainer died.
            StopTraining: the user asked for it.
            TimeoutError: the manager does not answer.
        """
        looks = (
            self._session.stop.watch(),
            self._watch_trainers(),
            self._watch_engines(),
            self._watch_manager_and_workers(),
        )
        return await self.wait(batch, "the round", None, (*looks, *watches))

    async def _watch_workers(self, what: str) -> NoReturn:
        """Replace each worker whose ``serve`` ends during ``what``, for ever.

        Nothing ends the wait in the middle of it: half a replacement would be worse than a late answer.
        """
        while True:
            lost = await self._pool.ended()
            await whole(self._pool.replace(lost, what, self._release))

    async def _release(self, worker: str) -> int:
        """Requeue the samples of ``worker``, which is gone; returns how many."""
        what = f"requeuing the samples of {worker}"
        return await wait(self._manager.release_worker.remote(worker), self._deadlines.interrupt_s, what, "interrupt_s")

    async def _watch_manager_and_workers(self) -> NoReturn:
        """Ask manager and workers for a sign of life, for ever; a worker that gives none is ended."""
        deadline_s = self._deadlines.interrupt_s
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            what = "asking the manager actor how far the round is"
            await wait(self._manager.standing.remote(), deadline_s, what, "interrupt_s")
            await self._pool.ask("__ray_ready__")

    async def _watch_trainers(self) -> NoReturn:
        """Ask the trainers for a sign of life, for ever: in all other phases the driver awaits their answers.

        Raises:
            TrainerLostError: one died.
        """
        trainers = self._session.trainers
        while True:
            await asyncio.gather(*[_look_after(trainers, rank) for rank in range(len(trainers))])
            await asyncio.sleep(LOOK_EVERY_S)

    async def _watch_engines(self) -> NoReturn:
        """Tell the manager, for ever, that engines decode: a sample of 60,000 tokens may report nothing for longer than
        ``deadlines.stall_s``, and is no stall."""
        before: Load = {}
        while True:
            await asyncio.sleep(self._deadlines.stall_s / ASKED_IN_A_STALL)
            now = await self._session.control.load()
            if decoded_between(before, now):
                await self._manager.note_decoding.remote()
            before |= now


async def _look_after(trainers: Sequence[Any], rank: int) -> None:
    try:
        await answer_of(lambda: result_of(trainers[rank].__ray_ready__.remote()))
    except RayActorError as error:
        raise TrainerLostError(f"trainer {rank} of {len(trainers)} died during the round: {one_line(error)}") from error
