"""Rounds of partial rollout: fill verl's empty batch slots with the N groups that a round completes.

The steps of a round; each awaits the one before::

    next round is prepared -> workers may call engines -> batch complete -> workers stop calling, replicas abort -> take it

While the trainer updates, the workers report what the round left unfinished; then the manager admits the prompts of the
next round and grants its samples, which wait at their workers' gates. No engine waits for any of this.

A round ends once, in ``finish_round``, which the trainer calls after it has updated on the batch. Operations that need a
finished round (validation, a checkpoint, the metrics of a step, the next round) fail before that; they never wait.

The ``Guard`` watches every wait: a worker that dies is replaced, and others take over its samples.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from verl.protocol import DataProto

from recipe.partial_rollout.manager.messages import Flushed, RoundStart
from recipe.partial_rollout.manager.output_store import fetch_groups
from recipe.partial_rollout.manager.types import FilteredGroup, TakenGroup
from recipe.partial_rollout.records.rollout_phase import RolloutPhase
from recipe.partial_rollout.rollout.filled_slots import fill_slots
from recipe.partial_rollout.rollout.live_round import LiveRound
from recipe.partial_rollout.rollout.played_round import PlayedRound, check_batch
from recipe.partial_rollout.rollout.round_parts import RoundParts
from recipe.partial_rollout.rollout.round_watch import RoundWatch
from recipe.partial_rollout.rollout.stop import StopTraining
from recipe.partial_rollout.rollout.trained_round import TrainedRound
from recipe.partial_rollout.waits import result_of


class Rounds:
    """Plays rounds, one after the other.

    Args:
        parts: of the rollout.
    """

    def __init__(self, parts: RoundParts) -> None:
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
        self._watch = RoundWatch(
            context.settings, context.control, standing=lambda: result_of(manager.standing.remote())
        )
        self._round: LiveRound | None = None
        """the last round that was opened; None before the first"""
        self._next: LiveRound | None = None
        """the next round, prepared or about to be"""
        self._preparing: Any = None
        """Ray reference to the ``RoundStart`` of ``_next``"""
        self._exhausted = False
        self._figures: dict[str, float] = {}

    @property
    def exhausted(self) -> bool:
        """Whether the data has ended with fewer prompts left than a batch needs; known once a round is finished."""
        return self._exhausted

    async def play(self, slots: DataProto) -> DataProto:
        """Play one round; row i of the result belongs to slot i // rollout.n.

        Raises:
            RuntimeError: the previous round is not finished; the message names its state.
            RolloutFailedError: a worker, replica, reward function or the manager failed; the message names it.
            TrainerLostError: a trainer died while it waited for the batch.
            TimeoutError: a wait passed its deadline.
            StopTraining: the user asked for it; the round is over, and the manager knows everything decoded.
        """
        self._require_finished("the next round")
        step = int(slots.meta_info["global_steps"])
        began = time.time()
        self._context.trace.begin(step)
        opened, start = await self._open_round(step)
        opened_at = time.time()
        await self._guard.wait(self._pool.open_round(), "opening the round", key=None)
        try:
            complete = self._guard.batch(lambda: result_of(self._manager.wait_round.remote()))
            ended = await self._watch.during(step, complete)
        except StopTraining:
            await self._give_up(opened)
            raise
        await self._interrupt(opened)
        quiet_at = time.time()
        groups = await self._take_batch()
        settings = self._context.settings
        check_batch(groups, settings.batch_groups, settings.failures.max_masked_fraction)
        opened.flush(PlayedRound(step, start, ended, began, opened_at, quiet_at, groups, *self._begin_collecting()))
        if step < self._context.last_step:
            self._prepare(step + 1, ended.wanted)
        return fill_slots(self._context, groups, slots)

    async def finish_round(self) -> None:
        """End the round, after the trainer has updated on its batch: wait for the last reports, and book the round.

        Afterwards the manager knows everything that the round did, and that its batch is trained; the next round is
        being prepared.

        Raises:
            RuntimeError: no round is flushing; the message names its state.
        """
        if self._round is None:
            raise RuntimeError("no round has been played: there is nothing to finish")
        played = self._round.played()
        waiting_since = time.time()
        flushed = await self._collect(played.flushing, played.flushed)
        flush_s = time.time() - waiting_since
        calls = await self._guard.wait(self._pool.take_calls(), "collecting the engine calls", key=None)
        filtered: tuple[FilteredGroup, ...] = ()
        if self._context.settings.group_filter is not None:
            filtered = await self._guard.wait(self._manager.take_filtered.remote(), "collecting the filtered groups")
        self._figures = {
            **self._book.note(
                TrainedRound(
                    step=played.step,
                    start=played.start,
                    admitted=played.end.admitted,
                    phase=RolloutPhase(played.began, played.quiet_at, calls),
                    groups=played.groups,
                    filtered=filtered,
                    gauges=flushed.metrics,
                    waits={**played.waits(flushed, calls), "flush_s": flush_s},
                )
            ),
            "failures/workers_restarted_total": self._pool.restarted,
            **await self._context.engine_metrics(),
        }
        await self._slots.reckon(calls)
        if self._next is not None:
            await self._readied()
        uids = [group.uid for group in played.groups]
        await self._guard.wait(self._manager.acknowledge.remote(uids), "acknowledging the batch")
        assert self._context.ledger is not None
        self._context.ledger.trained(played.step, played.step - 1, played.groups)
        self._round.finish()

    def take_step_metrics(self) -> dict[str, float]:
        """Metrics of the last round, without the ``partial_rollout/`` prefix.

        Raises:
            RuntimeError: it is not finished; the message names its state.
        """
        self._require_finished("its figures")
        taken, self._figures = self._figures, {}
        return taken

    async def make_way_for_validation(self) -> None:
        """Let validation use the replicas, including those that were restarted for the weight sync.

        Raises:
            RuntimeError: the last round is not finished, so its engine calls would be counted as validation's.
        """
        self._require_finished("validation")
        await self._guard.wait(self._roster.meet_new(self._pool), "announcing restarted replicas", key=None)

    async def save(self, path: Path) -> Any:
        """Write the manager's state to ``path``; returns the actor's account of it (``Written``).

        Raises:
            RuntimeError: the last round is not finished, so its samples would be missing.
        """
        self._require_finished("a checkpoint")
        return await self._guard.wait(self._manager.save.remote(str(path)), f"saving {path}", "weight_sync_s")

    async def load(self, path: Path, step: int) -> None:
        """Restore the state at ``path``, from the checkpoint of ``step``, before the first round."""
        await self._guard.wait(self._manager.load.remote(str(path)), f"loading {path}", "weight_sync_s")
        if self._context.settings.group_filter is not None:
            metrics = await self._guard.wait(self._manager.metrics.remote(), "asking the manager for its metrics")
            self._book.resume(int(metrics["filter/spared_total"]))
            # The data may have ended before the checkpoint: ``exhausted`` must say so before the first slot.
            self._prepare(step + 1, await self._wanted())
            await self._readied()

    def _require_finished(self, what: str) -> None:
        if self._round is not None:
            self._round.require_finished(what)

    # -- the parts of a round --------------------------------------------------------------------------------------

    def _prepare(self, step: int, wanted: int) -> None:
        """Have the manager grant the samples of ``step``'s round as soon as the last round is flushed."""
        source = self._context.source
        assert source is not None
        prompts = source.take(wanted)
        self._preparing = self._manager.prepare_round.remote(step - 1, prompts, source.left)
        self._next = LiveRound(step)

    async def _readied(self) -> RoundStart:
        what = "preparing the round, once the workers have reported of the last one,"
        start = await self._guard.wait(result_of(self._preparing), what)
        self._exhausted = start.exhausted
        return start

    async def _open_round(self, step: int) -> tuple[LiveRound, RoundStart]:
        await self._guard.wait(self._roster.meet_new(self._pool), "announcing restarted replicas", key=None)
        await self._parts.steer()
        if self._next is None:
            self._prepare(step, await self._wanted())
        start = await self._readied()
        opened, self._next = self._next, None
        assert opened is not None and opened.step == step
        opened.open()
        self._round = opened
        return opened, start

    async def _interrupt(self, opened: LiveRound) -> None:
        stopping = asyncio.gather(self._context.control.interrupt(), self._pool.close_round())
        await self._guard.wait(stopping, "interrupting the round", key=None)
        opened.interrupt()

    async def _give_up(self, opened: LiveRound) -> None:
        """End the round without a batch; the manager keeps what it decoded."""
        await self._guard.wait(self._manager.suspend_round.remote(), "suspending the round")
        await self._interrupt(opened)
        opened.flush(None)
        await self._collect(*self._begin_collecting())
        opened.finish()

    async def _take_batch(self) -> list[TakenGroup]:
        taken = await self._guard.wait(self._manager.take_batch.remote(), "taking the batch")
        fetching = asyncio.to_thread(fetch_groups, taken, self._store.fetch)
        return await self._guard.wait(fetching, "fetching the batch", key=None)

    async def _wanted(self) -> int:
        return await self._guard.wait(self._manager.wanted.remote(), "asking the manager how many prompts it wants")

    def _begin_collecting(self) -> tuple[list[Any], Any]:
        """Ray references: one a worker, resolved once it has reported everything; the manager's, once all have."""
        return self._pool.begin("flush"), self._manager.flush.remote()

    async def _collect(self, flushing: list[Any], flushed: Any) -> Flushed:
        what = "collecting the interrupted samples from the agent-loop workers"
        await self._guard.wait(self._pool.answers("flush", flushing), what, key=None)
        return await self._guard.wait(result_of(flushed), what)
