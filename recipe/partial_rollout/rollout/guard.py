"""The guard: the way in which the driver waits for the manager, the replicas and the agent-loop workers.

Whatever it waits for, it watches the workers' ``serve`` calls: a worker that dies is replaced, and its samples are
requeued. A wait for the batch, which may take an hour, is watched by more, and whatever happens first ends it::

    a trainer dies | the user's stop | the manager does not answer | a worker does not answer | engines and samples stall

A worker that does not answer in time is ended, and replaced like one that died. Guarded waits do not nest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ray.exceptions import RayActorError

from recipe.partial_rollout.manager.messages import PromptsWanted, RolloutFailedError
from recipe.partial_rollout.rollout.engine_watch import watch_engines
from recipe.partial_rollout.rollout.worker_pool import WorkerPool
from recipe.partial_rollout.waits import one_line, result_of, within

if TYPE_CHECKING:
    from recipe.partial_rollout.rollout.rollout_context import RolloutContext

T = TypeVar("T")

LOOK_EVERY_S = 2.0
"""seconds between two questions to manager and workers during a wait for the batch"""


class Guard:
    """Waits, with deadlines.

    Args:
        context: parts of the trainer.
        manager: handle of the manager actor.
        pool: the agent-loop workers, connected to ``manager``.
        look_every_s: see ``LOOK_EVERY_S``.
    """

    def __init__(
        self, context: RolloutContext, manager: Any, pool: WorkerPool, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._context = context
        self._deadlines = context.settings.deadlines
        self._manager = manager
        self._pool = pool
        self._look_every_s = look_every_s

    async def wait(self, awaitable: Awaitable[T], what: str, key: str | None = "interrupt_s") -> T:
        """``awaitable``'s result.

        Args:
            what: names the wait in errors.
            key: of ``partial_rollout.deadlines``; None: what is awaited has deadlines of its own.

        Raises:
            TimeoutError: no result in time.
            RolloutFailedError: an actor other than a worker died.
            WorkerLostError: a worker failed, or was lost once too often.
        """
        if key is not None:
            awaitable = within(awaitable, getattr(self._deadlines, key), what, key)
        return await self._serving(awaitable, what)

    async def ask(self, verb: str, *args: Any) -> list[Any]:
        """The answers of the workers to ``verb``; see ``WorkerPool.ask``."""
        return await self._serving(self._pool.ask(verb, *args), f"asking the workers to {verb}")

    async def batch(self, ask: Callable[[], Awaitable[T | PromptsWanted]]) -> T:
        """The manager's answer to ``ask``, which is asked again whenever the manager wants prompts first.

        Raises:
            RolloutFailedError: a worker, replica, reward function or the manager failed; the message names it.
            TrainerLostError: a trainer died.
            StopTraining: the user asked for it.
            TimeoutError: the manager does not answer.
        """
        context, what = self._context, "the round"
        while True:
            stall_s = self._deadlines.stall_s
            answer = await self._serving(
                context.stop.unless_stopped(result_of(ask())),
                what,
                context.trainers.look(what),
                watch_engines(context.control.running_tokens, stall_s, self._manager.note_decoding.remote),
                self._look(),
            )
            if not isinstance(answer, PromptsWanted):
                return answer
            source = context.source
            assert source is not None
            prompts = source.take(answer.count)
            offered = result_of(self._manager.offer.remote(prompts, source.left))
            await self.wait(offered, "offering prompts to the manager in the round")

    async def _serving(self, awaitable: Awaitable[T], what: str, *watches: Coroutine[Any, Any, Any]) -> T:
        """``awaitable``'s result; ``watches`` go on for ever, or raise what ends the wait."""
        main, *watching = (asyncio.ensure_future(each) for each in (awaitable, *watches))
        ended: asyncio.Task[int] | None = None
        try:
            while True:
                ended = ended or asyncio.create_task(self._pool.ended())
                await asyncio.wait({main, ended, *watching}, return_when=asyncio.FIRST_COMPLETED)
                if main.done():
                    return main.result()
                for watch in watching:
                    if watch.done():
                        watch.result()
                if ended.done():
                    # Nothing ends the wait in the middle of it: half a replacement would be worse than a late answer.
                    await self._pool.replace(ended.result(), what, self._release)
                    ended = None
        except RayActorError as error:
            raise RolloutFailedError(f"an actor died during {what}: {one_line(error)}") from error
        finally:
            for task in (main, ended, *watching):
                if task is not None:
                    task.cancel()

    async def _release(self, worker: str) -> int:
        """Requeue the samples of ``worker``, which is gone; returns how many."""
        what = f"requeuing the samples of {worker}"
        return await within(
            self._manager.release_worker.remote(worker), self._deadlines.interrupt_s, what, "interrupt_s"
        )

    async def _look(self) -> None:
        """Ask manager and workers for a sign of life, for ever; a worker that gives none is ended."""
        deadline_s = self._deadlines.interrupt_s
        while True:
            await asyncio.sleep(self._look_every_s)
            what = "asking the manager actor how far the round is"
            await within(self._manager.standing.remote(), deadline_s, what, "interrupt_s")
            await self._pool.ask("__ray_ready__")
