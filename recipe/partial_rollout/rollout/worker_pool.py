"""The agent-loop workers of a run: watched through their ``serve`` calls, and replaced if they die.

The live conversations of a dead worker's samples are lost. The manager requeues the samples with their journals, and the
worker that claims one next continues from its journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ray.exceptions import RayActorError

from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.waits import one_line, result_of, within

T = TypeVar("T")

logger = logging.getLogger(__name__)


class WorkerLostError(RuntimeError):
    """A worker died and is not replaced; the message names it."""


class WorkerPool:
    """Names, watches and replaces the workers.

    Args:
        workers: actor handles; changed in place when one is replaced, so that verl's manager sees the new one.
        spawn: makes the actor that replaces worker ``i``.
        connect: connects worker ``i``, under its name, to the manager and the replicas.
        restarts: replacements allowed over the whole run.
        deadline_s: seconds for a new worker to be ready.
    """

    def __init__(
        self,
        workers: list[Any],
        spawn: Callable[[int], Any],
        connect: Callable[[int, str, Any], Awaitable[object]],
        restarts: int,
        deadline_s: float,
    ) -> None:
        self._workers = workers
        self._spawn = spawn
        self._connect = connect
        self._restarts_left = self._restarts = restarts
        self._deadline_s = deadline_s
        self._names = [f"agent_loop_worker_{i}" for i in range(len(workers))]
        self._lives = [1] * len(workers)
        self._serving: list[Any] = [None] * len(workers)
        self._open = False

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def restarted(self) -> int:
        """Workers replaced since the start of the run."""
        return self._restarts - self._restarts_left

    async def start(self) -> None:
        """Connect every worker and let it serve."""
        await asyncio.gather(*[self._start(i) for i in range(len(self._workers))])

    async def _start(self, i: int) -> None:
        await self._connect(i, self._names[i], self._workers[i])
        self._serving[i] = self._workers[i].serve.remote()

    async def open_round(self) -> None:
        """Workers may call the engines."""
        self._open = True
        await self.ask("open_round")

    async def close_round(self) -> None:
        """Workers start no more engine calls."""
        self._open = False
        await self.ask("close_round")

    async def ask(self, verb: str, *args: Any) -> list[Any]:
        """The answers of the living workers; ``while_serving`` handles those that die meanwhile."""
        return await self.answers(self.begin(verb, *args))

    async def ask_each(self, verb: str, argument: Callable[[int], Any]) -> list[Any]:
        """As ``ask``, with ``argument(i)`` for worker ``i``."""
        return await self.answers([getattr(w, verb).remote(argument(i)) for i, w in enumerate(self._workers)])

    async def take_calls(self) -> tuple[EngineCall, ...]:
        """Engine calls of the living workers that ended since the last call."""
        return tuple(call for calls in await self.ask("take_calls") for call in calls)

    def begin(self, verb: str, *args: Any) -> list[Any]:
        """Ask every worker without waiting; returns references for ``answers``."""
        return [getattr(worker, verb).remote(*args) for worker in self._workers]

    @staticmethod
    async def answers(references: list[Any]) -> list[Any]:
        """The answers of the living workers."""

        async def one(reference: Any) -> list[Any]:
            try:
                return [await reference]
            except RayActorError:
                return []

        answers = await asyncio.gather(*[one(reference) for reference in references])
        return [answer for found in answers for answer in found]

    async def while_serving(self, awaitable: Awaitable[T], what: str, release: Callable[[str], Awaitable[int]]) -> T:
        """``awaitable``'s result; a worker that dies meanwhile is replaced, and ``release`` requeues its samples.

        Raises:
            WorkerLostError: a worker failed, or died once too often.
        """
        main = asyncio.ensure_future(awaitable)
        try:
            while True:
                watch = {asyncio.ensure_future(result_of(ref)): i for i, ref in enumerate(self._serving)}
                try:
                    await asyncio.wait({main, *watch}, return_when=asyncio.FIRST_COMPLETED)
                    if main.done():
                        return main.result()
                    ended = next(task for task in watch if task.done())
                    await self._replace(watch[ended], ended.exception(), what, release)
                finally:
                    for task in watch:
                        task.cancel()
        finally:
            main.cancel()

    async def _replace(
        self, i: int, error: BaseException | None, what: str, release: Callable[[str], Awaitable[int]]
    ) -> None:
        name = self._names[i]
        if not isinstance(error, RayActorError):
            raise WorkerLostError(f"{name} failed during {what}: {one_line(error)}") from error
        if not self._restarts_left:
            raise WorkerLostError(
                f"{name} died during {what} and is not restarted again "
                f"(partial_rollout.failures.worker_restarts={self._restarts}): {one_line(error)}"
            ) from error
        self._restarts_left -= 1
        self._lives[i] += 1
        requeued = await release(name)
        self._names[i] = f"agent_loop_worker_{i}.{self._lives[i]}"
        logger.warning(
            "%s died during %s, and %s takes its %d samples over: %s",
            name,
            what,
            self._names[i],
            requeued,
            one_line(error),
        )
        self._workers[i] = self._spawn(i)
        await within(self._start(i), self._deadline_s, f"starting {self._names[i]}", "worker_start_s")
        if self._open:
            await self._workers[i].open_round.remote()
