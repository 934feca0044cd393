"""Separate placement: one round that never ends, from which the trainer takes a batch for each policy version.

::

    engines   ==decode=========================|hold|==decode================
    trainer   wait | log-probs, update | stage |load| wait | log-probs, update
                   ^ play, version v                ^ next_version, v + 1

Samples run on while the trainer has its batch. A weight sync *holds* the engines: they stop between two tokens, load, and
go on with the same samples. Only a checkpoint or the end of training interrupts them, so that the manager knows every
token. The sync calls ``prepare_version`` before the hold and ``next_version`` once all engines have loaded.

During the driver's waits dead workers are replaced; one that dies while the trainer updates is replaced at the next wait,
and its samples go on from their journals.
"""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from verl.protocol import DataProto

from recipe.partial_rollout.manager.messages import RoundStart, StepAccount
from recipe.partial_rollout.manager.output_store import fetch_groups
from recipe.partial_rollout.manager.types import Prompt
from recipe.partial_rollout.rollout.filled_slots import fill_slots
from recipe.partial_rollout.rollout.played_round import check_batch
from recipe.partial_rollout.rollout.round_parts import RoundParts
from recipe.partial_rollout.rollout.round_watch import RoundWatch
from recipe.partial_rollout.rollout.split_calls import SplitCalls
from recipe.partial_rollout.rollout.stop import StopTraining
from recipe.partial_rollout.rollout.streamed_batch import StreamedBatch
from recipe.partial_rollout.waits import result_of


class StreamState(StrEnum):
    """Whether samples run."""

    READY = "ready"
    """no sample has been started; ``begin`` has not been called"""
    BEGUN = "begun"
    """the next version opens the round"""
    RUNNING = "running"
    """samples run"""
    STOPPED = "stopped"
    """the engines are quiet, and the manager knows every token"""


class Stream:
    """Takes batches from a rollout that goes on.

    Args:
        parts: of the rollout.
        ended_calls: the engine calls that ended.
    """

    def __init__(self, parts: RoundParts, ended_calls: SplitCalls) -> None:
        context, manager = parts.context, parts.manager
        self._parts = parts
        self._context = context
        self._manager = manager
        self._store = parts.store
        self._pool = parts.pool
        self._roster = parts.roster
        self._slots = parts.slots
        self._book = parts.book
        self._guard = parts.guard
        self._ended_calls = ended_calls
        self._watch = RoundWatch(
            context.settings, context.control, standing=lambda: result_of(manager.standing.remote())
        )
        self._state = StreamState.READY
        self._start = RoundStart(0, 0)
        """what the present version began with"""
        self._prompts: list[Prompt] = []
        """of the next version, taken from the source"""
        self._wanted: int | None = None
        """prompts that the next version needs; None: the manager is asked"""
        self._batch: StreamedBatch | None = None
        """with the trainer, until ``finish_round``"""
        self._step = 0
        """whose batch was taken last"""
        self._since = 0.0
        """when the last batch was taken, or the round opened (unix seconds)"""
        self._exhausted = False
        self._figures: dict[str, float] = {}

    @property
    def exhausted(self) -> bool:
        """Whether the data has ended with fewer prompts left than a batch needs; known once a version has begun."""
        return self._exhausted

    # -- versions --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """From the next version on samples run."""
        self._state = StreamState.BEGUN

    async def prepare_version(self, version: int) -> None:
        """Read the prompts that ``version`` admits; called while the engines decode under the version before."""
        if self._state is StreamState.READY or version >= self._context.last_step:
            return
        source = self._context.source
        assert source is not None
        wanted = self._wanted
        if wanted is None:
            asking = "asking the manager how many prompts it wants"
            wanted = await self._guard.wait(result_of(self._manager.wanted.remote()), asking)
        self._prompts = source.take(wanted)

    async def next_version(self, version: int) -> None:
        """All engines hold ``version``: admit its groups. The first time, let the workers call the engines.

        Raises:
            RuntimeError: the batch of the version before is not trained.
        """
        await self._guard.wait(self._roster.meet_new(self._pool), "announcing restarted replicas", key=None)
        if self._state is StreamState.READY or version >= self._context.last_step:
            return
        await self._parts.steer()
        source = self._context.source
        assert source is not None
        beginning = self._manager.next_version.remote(version, self._prompts, source.left)
        self._start = await self._guard.wait(beginning, f"beginning policy version {version}")
        self._exhausted = self._start.exhausted
        if self._state is not StreamState.RUNNING:
            self._since = time.time()
            self._state = StreamState.RUNNING
            await self._guard.wait(self._pool.open_round(), "opening the round", key=None)

    def note_phase(self, name: str, version: int, start: float, end: float) -> None:
        """Note a phase of the sync of ``version``: ``stage`` or ``hold``; moments in unix seconds."""
        self._context.trace.phase(name, version, start, end)
        self._figures[f"timing/{name}_s"] = end - start

    # -- batches ---------------------------------------------------------------------------------------------------

    async def play(self, slots: DataProto) -> DataProto:
        """Wait for this version's batch and take it; row i of the result belongs to slot i // rollout.n.

        Raises:
            RuntimeError: the batch before it is not trained, or no sample runs.
            RolloutFailedError: a worker, replica, reward function or the manager failed; the message names it.
            TrainerLostError: a trainer died while it waited for the batch.
            TimeoutError: a wait passed its deadline.
            StopTraining: the user asked for it; the engines are quiet, and the manager knows everything decoded.
        """
        self._require_trained("the next batch")
        if self._state is not StreamState.RUNNING:
            raise RuntimeError(f"the rollout is {self._state}, not running: no batch can complete")
        step, asked_at = int(slots.meta_info["global_steps"]), time.time()
        self._context.trace.begin(step)
        try:
            complete = self._guard.batch(lambda: result_of(self._manager.next_batch.remote()))
            taken = await self._watch.during(step, complete)
        except StopTraining:
            await self._suspend()
            raise
        taken_at = time.time()
        fetching = asyncio.to_thread(fetch_groups, taken, self._store.fetch)
        groups = await self._guard.wait(fetching, "fetching the batch", key=None)
        settings = self._context.settings
        check_batch(groups, settings.batch_groups, settings.failures.max_masked_fraction)
        self._context.trace.phase("wait", step, asked_at, taken_at)
        self._batch = StreamedBatch(step, self._start, self._since, asked_at, taken_at, groups)
        self._step, self._since = step, taken_at
        return fill_slots(self._context, groups, slots)

    async def finish_round(self) -> None:
        """The trainer has updated on its batch: tell the manager, and book the step. Samples run on.

        Raises:
            RuntimeError: the trainer has no batch.
        """
        batch = self._batch
        if batch is None:
            raise RuntimeError("the trainer has no batch: there is nothing to finish")
        calls = await self._ended_calls.take_training()
        account: StepAccount = await self._guard.wait(
            self._manager.finish_step.remote(batch.uids), "finishing the step"
        )
        self._wanted = account.wanted
        trained = batch.trained(account, calls)
        self._figures = {
            **self._book.note(trained),
            "failures/workers_restarted_total": self._pool.restarted,
            **await self._context.engine_metrics(),
        }
        await self._slots.reckon(calls)
        assert self._context.ledger is not None
        self._context.ledger.trained(batch.step, trained.version, batch.groups)
        self._batch = None

    def take_step_metrics(self) -> dict[str, float]:
        """Metrics of the last step, without the ``partial_rollout/`` prefix.

        Raises:
            RuntimeError: its batch is not trained.
        """
        self._require_trained("its figures")
        taken, self._figures = self._figures, {}
        return taken

    def _require_trained(self, what: str) -> None:
        if self._batch is not None:
            raise RuntimeError(f"the batch of step {self._batch.step} is not trained: it is too early for {what}")

    # -- validation, checkpoints, the end --------------------------------------------------------------------------

    async def make_way_for_validation(self) -> None:
        """Let validation use the replicas, which training samples use too, including those that were restarted."""
        await self._guard.wait(self._roster.meet_new(self._pool), "announcing restarted replicas", key=None)

    async def save(self, path: Path) -> Any:
        """Write the manager's state to ``path``, every token decoded so far included; returns its account (``Written``).

        Raises:
            RuntimeError: the batch that the trainer has is not trained.
        """
        self._require_trained("a checkpoint")
        if self._state is not StreamState.RUNNING:
            return await self._write(path)
        began = time.time()
        await self._guard.wait(self._manager.begin_flush.remote(), "beginning to collect the samples")
        await self._stop()
        try:
            return await self._write(path)
        finally:
            await self._guard.wait(self._context.control.resume(), "resuming the replicas", key=None)
            await self._guard.wait(self._pool.open_round(), "opening the round", key=None)
            self._state = StreamState.RUNNING
            self._context.trace.phase("flush", self._step, began, time.time())

    async def load(self, path: Path, step: int) -> None:
        """Restore the state at ``path``, from the checkpoint of ``step``, before the first version."""
        await self._guard.wait(self._manager.load.remote(str(path)), f"loading {path}", "weight_sync_s")
        if self._context.settings.group_filter is not None:
            metrics = await self._guard.wait(self._manager.metrics.remote(), "asking the manager for its metrics")
            self._book.resume(int(metrics["filter/spared_total"]))

    async def end(self) -> None:
        """Interrupt what still runs: the training is over."""
        if self._state is StreamState.RUNNING:
            await self._suspend()
            await self._guard.wait(self._context.control.resume(), "resuming the replicas", key=None)

    async def _write(self, path: Path) -> Any:
        return await self._guard.wait(self._manager.save.remote(str(path)), f"saving {path}", "weight_sync_s")

    async def _suspend(self) -> None:
        """As ``_stop``; no sample can be claimed any more."""
        await self._guard.wait(self._manager.suspend_round.remote(), "suspending the round")
        await self._stop()

    async def _stop(self) -> None:
        """Interrupt the engines, and wait until the manager knows everything; it expects the workers' last reports."""
        stopping = asyncio.gather(self._context.control.interrupt(), self._pool.close_round())
        await self._guard.wait(stopping, "interrupting the round", key=None)
        what = "collecting the interrupted samples from the agent-loop workers"
        await self._guard.ask("flush")
        await self._guard.wait(self._manager.flush.remote(), what)
        self._state = StreamState.STOPPED
