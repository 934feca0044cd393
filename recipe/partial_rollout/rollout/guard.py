"""Supervises the agent-loop workers while the driver waits.

During each wait of the driver the guard watches the workers' ``serve`` calls. It replaces a worker that dies, and requeues
its samples: a single-turn sample goes on from its tokens, a conversation begins anew. It ends a worker that does not answer
in time, and replaces it like one that died. During a wait for the batch, which may take an hour, it watches more. The
first of these events ends that wait::

    a trainer dies | the user's stop | the manager does not answer | a worker fails, or is lost once too often | a stall

Meanwhile a line says how far the round is: on a terminal renewed every two seconds, elsewhere printed once a minute.
Guarded waits do not nest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

import ray
from ray.exceptions import RayActorError
from tqdm import tqdm

from recipe.partial_rollout.manager.types import RolloutFailedError, RoundProgress
from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.rollout.recorder import Recorder
from recipe.partial_rollout.rollout.replicas import ReplicaLoad, ServerControl, decoded_between
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.terminal import bars, say
from recipe.partial_rollout.waits import (
    START_S,
    NoAnswerError,
    answer_of,
    is_out_of_reach,
    one_line,
    result_of,
    wait,
    whole,
)

T = TypeVar("T")

LOOK_EVERY_S = 2.0
"""seconds between two questions to manager, workers, engines and trainers during a wait for the batch"""
_WATCH_EVERY_S = 0.1
"""seconds between two checks whether a ``serve`` call has ended; a check sends no request to the workers"""
_LOG_S = 60.0
"""seconds between two lines about a round where there is no terminal"""

logger = logging.getLogger(__name__)


class Guard:
    """Waits with deadlines, sends requests to the workers, and replaces workers that die.

    Args:
        recorder: the run's recorder; it has the settings, replicas and slots.
        manager: handle of the manager actor.
        workers: actor handles; changed in place when one is replaced, so that verl's manager sees the new one.
        spawn: makes the actor that replaces a worker.
        trainers: handles of the trainer workers, in the order of their ranks.
        stop: the signals that end the run.
    """

    def __init__(
        self,
        recorder: Recorder,
        manager: Any,
        workers: list[Any],
        spawn: Callable[[], Any],
        trainers: Sequence[Any],
        stop: StopSignals,
    ) -> None:
        self._recorder = recorder
        self._deadlines = recorder.settings.deadlines
        self._manager = manager
        self._workers = workers
        self._spawn = spawn
        self._trainers = trainers
        self._stop = stop
        self.restarted = 0
        """workers replaced since this process started; a resumed run counts from 0"""
        self._names = [f"agent_loop_worker_{i}" for i in range(len(workers))]
        self._serving: list[Future[None] | None] = [None] * len(workers)
        """future of each worker's ``serve`` call; None while a worker starts, and if it is lost and not replaced"""
        self._silent: dict[int, str] = {}
        """index of a worker that the guard killed, to the reason; removed once the guard handles its death"""
        self.open = False
        """whether workers may call the engines"""

    # -- waits -----------------------------------------------------------------------------------------------------

    async def wait(
        self,
        awaitable: Awaitable[T],
        what: str,
        key: str | None = "interrupt_s",
        watches: Iterable[Coroutine[Any, Any, Any]] = (),
    ) -> T:
        """Wait for ``awaitable`` and return its result. Workers that die meanwhile are replaced.

        Args:
            what: names the wait in errors.
            key: key of ``partial_rollout.deadlines`` that limits the wait; None: no limit, because ``awaitable`` has one.
            watches: run during the wait; an error of a watch ends the wait (``waits.wait``).

        Raises:
            TimeoutError: no result in time.
            RolloutFailedError: an actor other than a worker died; or a worker failed, or was lost once too often.
        """
        deadline_s = None if key is None else getattr(self._deadlines, key)
        try:
            return await wait(awaitable, deadline_s, what, key, watches=(self._watch_workers(what), *watches))
        except RayActorError as error:
            raise RolloutFailedError(f"an actor died during {what}: {one_line(error)}") from error

    async def wait_batch(self, batch: Awaitable[T], step: int, began: float) -> T:
        """Wait for ``batch``, the manager's answer about the batch of ``step``, and return it.

        ``began`` is the start of the round (``time.monotonic``).

        Raises:
            RolloutFailedError: a sample, worker, replica, trainer, reward function or the manager failed; the message
                names it.
            StopTraining: the user asked for it.
            TimeoutError: the manager does not answer.
        """
        looks = (
            self._stop.watch(),
            *(self._watch_trainer(rank, trainer) for rank, trainer in enumerate(self._trainers)),
            watch_round(self._recorder.control, self._recorder.settings.batch_groups, step, began, self._look),
        )
        return await self.wait(batch, "the round", None, looks)

    async def _watch_workers(self, what: str) -> NoReturn:
        """Replace each worker whose ``serve`` ends during the wait ``what``; runs until it is cancelled.

        A replacement is always completed, even if the wait ends meanwhile: half a replacement would be worse than a
        late answer.
        """
        while True:
            for i, serving in enumerate(self._serving):
                if serving is not None and serving.done():
                    await whole(self._replace(i, serving, what))
            await asyncio.sleep(_WATCH_EVERY_S)

    async def _watch_trainer(self, rank: int, trainer: Any) -> NoReturn:
        """Check again and again that a trainer lives. Runs until it is cancelled.

        Only the wait for the batch needs this check: in all other phases the driver awaits an answer of the trainer.

        Raises:
            RolloutFailedError: the trainer died.
        """
        while True:
            try:
                await answer_of(lambda: result_of(trainer.__ray_ready__.remote()))
            except RayActorError as error:
                raise RolloutFailedError(
                    f"trainer {rank} of {len(self._trainers)} died during the round: {one_line(error)}"
                ) from error
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self, decoded: bool) -> RoundProgress:
        """Check that manager and workers answer, and return the manager's progress. Kill a worker that does not answer.

        Args:
            decoded: whether engines have made tokens since the last call. Then the manager counts no stall: a sample of
                60,000 tokens may report nothing for longer than ``deadlines.stall_s``.
        """
        asking, deadline_s = self._manager.progress.remote(decoded), self._deadlines.interrupt_s
        progress = await wait(asking, deadline_s, "asking the manager actor how far the round is", "interrupt_s")
        await self.ask("__ray_ready__")
        return progress

    # -- the workers' life -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect every worker to the manager and the replicas, and let it serve.

        Raises:
            RolloutFailedError: a worker died.
            NoAnswerError: a worker did not start in time.
        """
        await asyncio.gather(*[self._start(i) for i in range(len(self._workers))])

    async def _start(self, i: int) -> None:
        run, count = self._recorder, len(self._workers)
        connecting = self._workers[i].connect.remote(
            self._names[i], self._manager, run.slots.of_a_worker(count), run.control.servers, i / count
        )
        try:
            await wait(connecting, START_S, f"starting {self._names[i]}")
        except RayActorError as error:
            raise RolloutFailedError(f"{self._names[i]} died during its start: {one_line(error)}") from error
        self._serve(i)

    def _serve(self, i: int) -> None:
        """Call ``serve`` of worker ``i``, and keep its future.

        Only a lost connection repeats the call: each await of the same Ray reference would leave another future behind.
        """
        self._serving[i] = self._workers[i].serve.remote().future()

    async def _replace(self, i: int, serving: Future[None], what: str) -> None:
        """Replace worker ``i``, whose ``serve`` has ended during ``what``.

        A worker that Ray only lost its connection to is kept. After a stop signal a dead worker is not replaced.

        Raises:
            RolloutFailedError: ``serve`` raised an error of its own, or ``failures.worker_restarts`` workers had been
                replaced before.
        """
        name, error = self._names[i], serving.exception()
        if is_out_of_reach(error) and await self._answer(i, "__ray_ready__"):
            logger.warning("Ray lost its connection to %s for a moment; the worker lives and goes on", name)
            self._serve(i)
            return
        if not isinstance(error, RayActorError):
            raise RolloutFailedError(f"{name} failed during {what}: {one_line(error)}") from error
        why = self._silent.pop(i, None) or f"died during {what}: {one_line(error)}"
        if self._stop.requested:
            logger.warning("%s %s; %d of its samples go into the checkpoint", name, why, await self._release(name))
            self._serving[i] = None
            return
        limit = self._recorder.settings.failures.worker_restarts
        if self.restarted == limit:
            raise RolloutFailedError(
                f"{name} {why}; it is not restarted again (partial_rollout.failures.worker_restarts={limit})"
            ) from error
        self.restarted += 1
        # From here on it is asked nothing: until it serves, each question would end in its deadline.
        self._serving[i] = None
        requeued = await self._release(name)
        # A number that no worker has had: the manager refuses reports in a name that is gone.
        self._names[i] = f"agent_loop_worker_{i}.{self.restarted + 1}"
        logger.warning("%s %s; %s takes its %d samples over", name, why, self._names[i], requeued)
        self._workers[i] = self._spawn()
        await self._start(i)
        if self.open:
            await self._answer(i, "open_round")

    async def _release(self, worker: str) -> int:
        """Requeue the samples of ``worker``, which is gone; returns how many."""
        what = f"requeuing the samples of {worker}"
        return await wait(self._manager.release_worker.remote(worker), self._deadlines.interrupt_s, what, "interrupt_s")

    async def follow_lengths(self, calls: Sequence[EngineCall]) -> None:
        """Adjust the number of slots to the context lengths in a step's ``calls``. Samples that hold a slot keep it."""
        if self._recorder.slots.update(calls):
            resizing = self._manager.resize_workers.remote(self._recorder.slots.of_a_worker(len(self._workers)))
            await self.wait(resizing, "telling the manager of the workers' slots")

    # -- questions to the workers ----------------------------------------------------------------------------------

    async def set_gate(self, *, open: bool) -> None:
        """Let the workers call the engines; or have them start no more calls, and report what they leave unfinished."""
        self.open = open
        await self.ask("open_round" if open else "close_round")

    async def ask(self, verb: str, *args: Any) -> list[Any]:
        """Call the method ``verb`` of every serving worker, and return the answers. Call ``ask`` within a guarded wait.

        A call may be repeated, so ``verb`` must be idempotent. A worker that does not answer within
        ``deadlines.interrupt_s`` is killed, and then replaced. A worker that is starting is not called.
        """
        serving = [i for i, each in enumerate(self._serving) if each is not None]
        found = await asyncio.gather(*[self._answer(i, verb, *args) for i in serving])
        return [answer for answers in found for answer in answers]

    async def _answer(self, i: int, verb: str, *args: Any) -> list[Any]:
        """Return the answer of worker ``i`` in a list, which is empty if the worker is lost.

        Once a signal has come, the worker has less time to answer.
        """
        worker, limit_s = self._workers[i], self._deadlines.interrupt_s
        asking = answer_of(lambda: result_of(getattr(worker, verb).remote(*args)))
        try:
            return [await wait(asking, limit_s, verb.strip("_"), "interrupt_s", watches=[self._stop.grace()])]
        except RayActorError:
            return []
        except NoAnswerError as late:
            # It may have been replaced while the question was open.
            if self._workers[i] is worker:
                self._silent[i] = f"was ended because it did not answer: {late}"
                ray.kill(worker)
            return []


# -- how far a round is --------------------------------------------------------------------------------------------------


async def watch_round(
    control: ServerControl,
    batch_groups: int,
    step: int,
    began: float,
    look: Callable[[bool], Awaitable[RoundProgress]] | None = None,
) -> NoReturn:
    """Show the progress of the round of ``step``, for ever: below verl's progress bar on a terminal, else as printed lines.

    Args:
        began: start of the round, ``time.monotonic``.
        look: asks the manager for the progress. Its argument tells whether an engine has made tokens since the last call.
            None under noPR.
    """
    seen = await control.load()
    shown, shown_at = dict(seen), time.monotonic()
    # tqdm switches it off where there is no terminal.
    with tqdm(
        total=0, position=1, leave=False, bar_format="{desc}", dynamic_ncols=True, disable=None, file=bars()
    ) as bar:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            load = await control.load()
            progress = await look(decoded_between(seen, load) > 0) if look else None
            # A replica that does not answer keeps its last figure.
            seen |= load
            now = time.monotonic()
            if bar.disable and now < shown_at + _LOG_S:
                continue
            rate = decoded_between(shown, load) / (now - shown_at) if shown and load else None
            line = round_line(step, now - began, batch_groups, progress, load, rate)
            if bar.disable:
                say(line)
            else:
                bar.set_description_str(line)
            shown, shown_at = dict(seen), now


def round_line(
    step: int,
    seconds: float,
    batch_groups: int,
    progress: RoundProgress | None,
    load: ReplicaLoad,
    tokens_per_s: float | None,
) -> str:
    """Return the line that shows a round in progress. Parts without a value are left out.

    ``progress`` is None under noPR, ``load`` is empty if no replica answers, ``tokens_per_s`` is None if unknown.

    >>> round_line(7, 143.2, 64, RoundProgress(37, 240, 2), {"a": (118, 0), "b": (122, 0)}, 5310.4)
    'step 7 | 37 of 64 groups ready | running 118 + 122 | 5,310 tok/s | oldest 2 versions | 143 s'
    """
    running = [count for count, _ in load.values()]
    parts = [f"step {step}"]
    if progress is not None:
        parts.append(f"{progress.ready_groups} of {batch_groups} groups ready")
    if running:
        parts.append(f"running {' + '.join(map(str, running))}")
    if tokens_per_s is not None:
        parts.append(f"{tokens_per_s:,.0f} tok/s")
    if progress is not None:
        parts.append(f"oldest {progress.oldest} version{'' if progress.oldest == 1 else 's'}")
    return " | ".join([*parts, f"{seconds:.0f} s"])
