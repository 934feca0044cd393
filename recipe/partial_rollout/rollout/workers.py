"""The agent-loop workers of a run: watched through their ``serve`` calls, asked with a deadline, replaced if they are lost.

The live conversations of a lost worker's samples are lost. The manager requeues the samples with their journals, and the
worker that claims one next continues from its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError

from recipe.partial_rollout.config.settings import Deadlines
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.waits import START_S, NoAnswerError, answer_of, is_out_of_reach, one_line, result_of, wait

logger = logging.getLogger(__name__)


class WorkerLostError(RuntimeError):
    """A worker died and is not replaced; the message names it."""


class WorkerPool:
    """Names, asks and replaces the workers; the guard calls it, so that all are watched meanwhile.

    Args:
        workers: actor handles; changed in place when one is replaced, so that verl's manager sees the new one.
        spawn: makes the actor that replaces worker ``i``.
        connect: connects worker ``i``, under its name, to the manager and the replicas.
        restarts: replacements allowed over the whole run.
        stop: once the user has asked to stop, workers have a shorter time to answer, and are not replaced.
    """

    def __init__(
        self,
        workers: list[Any],
        spawn: Callable[[int], Any],
        connect: Callable[[int, str, Any], Awaitable[object]],
        restarts: int,
        deadlines: Deadlines,
        stop: StopSignals,
    ) -> None:
        self._workers = workers
        self._spawn = spawn
        self._connect = connect
        self._restarts = restarts
        self.restarted = 0
        """workers replaced since the start of the run"""
        self._deadlines = deadlines
        self._stop = stop
        self._names = [f"agent_loop_worker_{i}" for i in range(len(workers))]
        self._lives = [1] * len(workers)
        self._serving: list[Future[None] | None] = [None] * len(workers)
        """of the ``serve`` calls; None for a worker that is gone for good"""
        self._silent: dict[int, str] = {}
        """why a worker was ended"""
        self._wakes: set[Callable[[], object]] = set()
        self._open = False

    def __len__(self) -> int:
        return len(self._workers)

    async def start(self) -> None:
        """Connect every worker and let it serve."""
        await asyncio.gather(*[self._start(i) for i in range(len(self._workers))])

    async def _start(self, i: int) -> None:
        connecting = self._connect(i, self._names[i], self._workers[i])
        await wait(connecting, START_S, f"starting {self._names[i]}")
        self._watch(i)

    # -- their life ------------------------------------------------------------------------------------------------

    def _watch(self, i: int) -> None:
        """Await ``serve``, once in a worker's life: each await of a Ray reference that goes on leaves a future behind."""
        self._serving[i] = serving = self._workers[i].serve.remote().future()
        serving.add_done_callback(lambda _: self._wake())

    def _wake(self) -> None:
        for wake in tuple(self._wakes):
            # A wait that is over may have closed its event loop.
            with contextlib.suppress(RuntimeError):
                wake()

    async def ended(self) -> int:
        """Wait until a worker's ``serve`` has ended; returns the worker's number."""
        woken, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> object:
            return loop.call_soon_threadsafe(woken.set)

        self._wakes.add(wake)
        try:
            while True:
                woken.clear()
                for i, serving in enumerate(self._serving):
                    if serving is not None and serving.done():
                        return i
                await woken.wait()
        finally:
            self._wakes.discard(wake)

    async def replace(self, i: int, what: str, release: Callable[[str], Awaitable[int]]) -> None:
        """Replace worker ``i``, whose ``serve`` has ended during ``what``; ``release`` requeues its samples.

        Raises:
            WorkerLostError: it failed, or a worker was lost once too often.
        """
        name, serving = self._names[i], self._serving[i]
        assert serving is not None
        error = serving.exception()
        if is_out_of_reach(error) and await self._is_back(i):
            self._watch(i)
            return
        if not isinstance(error, RayActorError):
            raise WorkerLostError(f"{name} failed during {what}: {one_line(error)}") from error
        why = self._silent.pop(i, None) or f"died during {what}: {one_line(error)}"
        if self._stop.asked:
            logger.warning("%s %s; %d of its samples go into the checkpoint", name, why, await release(name))
            self._serving[i] = None
            return
        if self.restarted == self._restarts:
            raise WorkerLostError(
                f"{name} {why}; it is not restarted again (partial_rollout.failures.worker_restarts={self._restarts})"
            ) from error
        self.restarted += 1
        self._lives[i] += 1
        requeued = await release(name)
        self._names[i] = f"agent_loop_worker_{i}.{self._lives[i]}"
        logger.warning("%s %s; %s takes its %d samples over", name, why, self._names[i], requeued)
        self._workers[i] = self._spawn(i)
        await self._start(i)
        if self._open:
            await self._answer(i, "open_round")

    async def _is_back(self, i: int) -> bool:
        """Whether worker ``i``, to which Ray lost its connection, answers again; its samples have gone on."""
        answers = await self._answer(i, "__ray_ready__")
        if answers:
            logger.warning("Ray lost its connection to %s for a moment; it goes on", self._names[i])
        return bool(answers)

    # -- questions -------------------------------------------------------------------------------------------------

    async def open_round(self) -> None:
        """Workers may call the engines."""
        self._open = True
        await self.ask("open_round")

    async def close_round(self) -> None:
        """Workers start no more engine calls."""
        self._open = False
        await self.ask("close_round")

    async def ask(self, verb: str, *args: Any, begun: Sequence[Any] = ()) -> list[Any]:
        """The answers of the living workers to a question that may be asked twice.

        A worker that gives none within ``deadlines.interrupt_s`` is ended, and then replaced.

        Args:
            begun: references from ``begin``, if the question was asked before.
        """
        found = await asyncio.gather(*[self._answer(i, verb, *args, begun=begun) for i in range(len(self))])
        return [answer for answers in found for answer in answers]

    def begin(self, verb: str) -> list[Any]:
        """Ask every worker without waiting."""
        return [getattr(worker, verb).remote() for worker in self._workers]

    async def _answer(self, i: int, verb: str, *args: Any, begun: Sequence[Any] = ()) -> list[Any]:
        """The answer of worker ``i``; none if it is lost."""
        worker, asked = self._workers[i], list(begun[i : i + 1])

        def ask() -> Awaitable[Any]:
            return result_of(asked.pop() if asked else getattr(worker, verb).remote(*args))

        limit_s, began = self._deadlines.interrupt_s, time.monotonic()
        try:
            return [await wait(answer_of(ask), limit_s, verb, "interrupt_s", watches=[self._stop.grace()])]
        except RayActorError:
            return []
        except NoAnswerError:
            if self._workers[i] is worker:
                waited = f"{verb.strip('_')} within {time.monotonic() - began:.1f} s"
                limit = f"partial_rollout.deadlines.interrupt_s={limit_s:g}"
                self._silent[i] = f"did not answer {waited} ({limit}) and was ended"
                ray.kill(worker)
            return []
