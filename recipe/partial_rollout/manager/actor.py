"""``PromptsManager`` behind Ray: adds waiting, deadlines and failure propagation; it makes no decisions.

One condition guards the state, and every change notifies it. ``claim`` waits on it for work, ``wait_round`` for the end
of the round, ``next_batch`` for a batch of separate placement, whose round does not end. The first failure that anyone
reports is raised to everyone who waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from recipe.partial_rollout.checkpoint.snapshot import Written
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager import garbage
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.condition import ManagerCondition
from recipe.partial_rollout.manager.failure_policy import FailurePolicy
from recipe.partial_rollout.manager.group_filter import GroupFilter
from recipe.partial_rollout.manager.messages import (
    Batch,
    Flushed,
    PromptsWanted,
    Report,
    Restored,
    RolloutFailedError,
    RoundEnd,
    RoundStart,
    Standing,
    StepAccount,
    VersionStart,
)
from recipe.partial_rollout.manager.output_store import InProcess, OutputStore
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.report_book import ReportBook
from recipe.partial_rollout.manager.stall_clock import StallClock
from recipe.partial_rollout.manager.state_file import StateFile
from recipe.partial_rollout.manager.stream_verbs import StreamVerbs
from recipe.partial_rollout.manager.types import FilteredGroup, FinishedOutput, Grant, Prompt, TakenGroup


class ManagerActor(StreamVerbs):
    """Ray actor (``ray.remote(ManagerActor)``) around one ``PromptsManager``.

    Args:
        stall_s: the run ends once no sample has reported and no engine has made a token for so many seconds of an open
            round.
        failures: what to do with a sample whose agent loop raised.
        group_filter: which finished groups are replaced; None: none.
        store: keeps the outputs of finished samples; ``InProcess`` needs no Ray.
    """

    CLAIM_WAIT_S = 20.0
    """after this long a claim returns empty-handed, so that a worker notices when the manager is gone"""
    CLAIM_SAMPLES = 512
    """most samples that one answer grants: a round of 100,000 samples can start before all of them are granted"""
    SHARE_WAIT_S = 1.0
    """a worker that has its share waits this long for the others to claim theirs, then runs some of what they left"""

    def __init__(
        self,
        admission: Admission,
        scheduling: Scheduling,
        stall_s: float,
        failures: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
        group_filter: GroupFilter | None = None,
        store: OutputStore = InProcess(),  # noqa: B008 - stateless
    ) -> None:
        self._changed = ManagerCondition()
        self._progress = StallClock(stall_s)
        self._store = store
        self._manager = PromptsManager(admission, scheduling, time.monotonic, failures, group_filter)
        self._saved = StateFile(self._manager, store, self._changed)
        self._book = ReportBook(self._manager, store, self._changed.fail, self._retry_later)
        self._retries: set[asyncio.Task[None]] = set()
        self._unflushed: set[str] = set()
        """workers that may still have something to report about the finished round"""
        self._suspended = False
        self._flushed = Flushed(time.time(), self._manager.metrics())
        self._metrics_at_flush: dict[str, float] | None = None
        """of the last flush, if it followed a stop; until the next batch"""
        self._told = False
        """whether ``wait_batch`` has told what was admitted"""

    # -- trainer ---------------------------------------------------------------------------------------------------

    async def wanted(self) -> int:
        """Number of prompts that the next round may need beyond the reserve."""
        return self._manager.wanted

    async def set_overlap(self, overlap: float) -> None:
        """``PromptsManager.set_overlap``; call it between rounds."""
        self._manager.set_overlap(overlap)

    async def begin_version(self, version: int, prompts: list[Prompt], source_left: int) -> VersionStart:
        """Begin ``version`` once the workers have reported everything of a stopped round.

        Its groups are admitted, and workers may claim. Where the round was stopped, the trainer may still be updating:
        claimed samples wait at their workers' gates until the engines hold ``version``. ``source_left``: prompts that
        remain in the source after ``prompts``.

        Raises:
            RuntimeError: see ``Round.begin_version``.
        """
        async with self._changed:
            await self._until_flushed()
            return self._begin(prompts, source_left, lambda: self._manager.begin_version(version))

    async def wait_batch(self, stop: bool) -> Batch | PromptsWanted:
        """Wait until the batch of this version is complete, and take it.

        With ``stop`` no sample can be claimed from then on, and ``flush`` waits for every worker. Without, everything else
        runs on, and what admission allows is refilled. Returns early with ``PromptsWanted`` when dynamic sampling runs low
        on reserve prompts, and with no groups if the rollout was suspended: then what the last reports complete goes into
        the checkpoint. A caller that does not wait for the answer loses nothing: a checkpoint has groups and uids.

        Raises:
            RuntimeError: the trainer has this version's batch already, or there is no version yet.
            RolloutFailedError: something failed, or nothing moved for ``stall_s``.
        """
        async with self._changed:
            if not self._suspended:
                self._manager.require_open("wait_batch")
            if wanted := await self._until_complete():
                return wanted
            if self._suspended:
                return Batch(time.time())
            self._changed.raise_failure()
            decided_at = time.time()
            self._metrics_at_flush = None
            self._store.seal()
            groups, admitted = self._manager.complete_batch(stop=stop)
            self._told = True
            if stop:
                self._expect_flush()
            else:
                garbage.release()
                self._manager.admit()
            self._changed.notify()
            return Batch(decided_at, groups, admitted, self._manager.wanted)

    async def finish_step(self, uids: list[str]) -> StepAccount:
        """The trainer has updated on these groups; if the round was stopped, wait for its flush first."""
        async with self._changed:
            if not self._manager.round_open:
                await self._until_flushed()
            # The batch's own figures are known only while the trainer has it.
            metrics = self._metrics_at_flush or self._manager.metrics()
            self._metrics_at_flush = None
            self._manager.acknowledge(uids)
            admitted = () if self._told else self._manager.take_admitted()
            self._told = False
            return StepAccount(self._manager.take_filtered(), self._manager.wanted, metrics, admitted)

    async def suspend(self) -> None:
        """End the round without a batch, to checkpoint and stop: no sample can be claimed from here on."""

        def close() -> None:
            self._suspended = True
            self._manager.close_round()
            self._expect_flush()

        await self._changed.change(close)

    async def begin_flush(self) -> None:
        """The workers are about to report everything that they have, and ``flush`` waits for it; claims go on."""
        await self._changed.change(self._expect_flush)

    async def prepare_round(self, version: int, prompts: list[Prompt], source_left: int) -> RoundStart:
        """Wait until the last round is flushed; then take new prompts, admit the round's first groups, let workers claim.

        The trainer may still be updating: claimed samples wait at their workers' gates until the engines hold
        ``version``. ``source_left``: prompts that remain in the source after ``prompts``.
        """
        async with self._changed:
            await self._until_flushed()
            self._manager.advance_version(version)
            return self._begin(prompts, source_left, self._manager.open_round)

    def _begin(self, prompts: list[Prompt], source_left: int, admit: Callable[[], int]) -> RoundStart:
        self._manager.offer(prompts)
        self._manager.note_source(source_left)
        carried = self._manager.carried_groups
        if self._manager.exhausted:
            return RoundStart(0, carried, exhausted=True)
        admitted = admit()
        self._suspended = False
        self._changed.notify()
        return RoundStart(admitted, carried)

    async def offer(self, prompts: list[Prompt], source_left: int) -> None:
        """Answer to ``PromptsWanted``: in the open round these prompts replace filtered groups."""

        def book() -> None:
            self._manager.offer(prompts)
            self._manager.note_source(source_left)
            if self._manager.round_open and not self._manager.round_complete():
                self._manager.admit()

        await self._changed.change(book)

    async def wait_round(self) -> RoundEnd | PromptsWanted:
        """Wait until the batch is complete; no sample can be claimed from then on. The engines run from this call on.

        Returns early with ``PromptsWanted``, the round still open, when dynamic sampling runs low on reserve prompts.
        """
        async with self._changed:
            if wanted := await self._until_complete():
                return wanted
            if self._suspended:
                # The trainer waits no longer: if the last reports complete a batch, it goes into the checkpoint.
                return RoundEnd(decided_at=time.time())
            admitted = self._manager.close_round()
            self._expect_flush()
            return RoundEnd(time.time(), admitted, self._manager.wanted)

    async def _until_complete(self) -> PromptsWanted | None:
        """Wait until the batch is complete or the round suspended; see ``wait_round``."""
        garbage.hold()
        self._progress.touch()
        while not self._suspended and not self._manager.round_complete():
            self._changed.raise_failure()
            if self._manager.short_of_prompts:
                return PromptsWanted(self._manager.wanted)
            await self._changed.wait(self._progress.left_s)
            if self._progress.stalled and not self._retries and not self._manager.round_complete():
                raise RolloutFailedError(f"{self._progress.words}; {self._manager.unfinished_report()}")
        return None

    async def note_decoding(self) -> None:
        """Note that an engine has made tokens that no worker has reported yet."""
        self._progress.touch()

    async def suspend_round(self) -> None:
        """``suspend``."""
        await self.suspend()

    async def flush(self) -> Flushed:
        """Wait until every worker has reported everything; returns when the last one had (unix seconds)."""
        async with self._changed:
            await self._until_flushed()
            return self._flushed

    def _expect_flush(self) -> None:
        self._unflushed = set(self._manager.workers)
        if not self._unflushed:
            self._note_flushed()

    def _note_flushed(self) -> None:
        garbage.release()
        metrics = self._manager.metrics()
        self._flushed = Flushed(time.time(), metrics)
        if not self._manager.round_open:
            self._metrics_at_flush = metrics

    async def _until_flushed(self) -> None:
        while self._unflushed:
            self._changed.raise_failure()
            await self._changed.wait(self.CLAIM_WAIT_S)

    async def take_batch(self) -> list[TakenGroup[FinishedOutput]]:
        """The groups of the finished round; the caller fetches their outputs from the store."""
        self._changed.raise_failure()
        self._store.seal()
        return self._manager.take_batch()

    async def take_filtered(self) -> tuple[FilteredGroup, ...]:
        """``PromptsManager.take_filtered``; the caller must note them in the ledger before the next checkpoint."""
        return self._manager.take_filtered()

    async def acknowledge(self, uids: list[str]) -> None:
        """The trainer has updated on these groups."""
        self._manager.acknowledge(uids)

    async def metrics(self) -> dict[str, float]:
        """``PromptsManager.metrics``."""
        return self._manager.metrics()

    async def standing(self) -> Standing:
        """``PromptsManager.standing``; it waits for nobody, and nobody for it."""
        return self._manager.standing()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    async def save(self, path: str) -> Written:
        """``StateFile.save``."""
        return await self._saved.save(Path(path))

    async def load(self, path: str) -> Restored:
        """``StateFile.load``; before the first round."""
        return await self._saved.load(Path(path))

    async def abandon(self, reason: str) -> None:
        """Fail everyone who waits, because something outside the manager has died."""
        async with self._changed:
            self._changed.fail(reason)
            self._changed.notify()

    # -- workers ---------------------------------------------------------------------------------------------------

    async def register_worker(self, worker: str, capacity: int) -> None:
        """A worker with ``capacity`` slots joins."""
        self._manager.register_worker(worker, capacity)

    async def resize_workers(self, capacity: int) -> None:
        """Every worker has ``capacity`` slots from here on."""

        def resize() -> None:
            for worker in self._manager.workers:
                self._manager.resize_worker(worker, capacity)

        await self._changed.change(resize)

    async def release_worker(self, worker: str) -> int:
        """Requeue the samples of a worker that is gone; returns how many."""
        requeued = await self._changed.change(lambda: self._manager.release_worker(worker))
        await self.flushed(worker)
        return requeued

    async def flushed(self, worker: str) -> None:
        """Note that ``worker`` has reported everything about the finished round, or never will."""

        def book() -> None:
            self._unflushed.discard(worker)
            if not self._unflushed:
                self._note_flushed()

        if worker in self._unflushed:
            await self._changed.change(book)

    async def claim(self, worker: str) -> list[Grant]:
        """Wait for samples to run; empty after ``CLAIM_WAIT_S`` without any."""
        began = time.monotonic()
        claimant = self._manager.incarnation(worker)
        left_since: float | None = None
        async with self._changed:
            while True:
                self._changed.raise_failure()
                # The caller may have died while its claim waited, and a new worker may have taken its name.
                if self._manager.incarnation(worker) is not claimant:
                    return []
                now = time.monotonic()
                patient = left_since is None or now < left_since + self.SHARE_WAIT_S
                if grants := self._manager.claim(worker, self.CLAIM_SAMPLES, beyond_share=not patient):
                    return grants
                if now >= began + self.CLAIM_WAIT_S:
                    return []
                until = began + self.CLAIM_WAIT_S
                if self._manager.held_back(worker):
                    left_since = now if left_since is None else left_since
                    until = min(until, left_since + self.SHARE_WAIT_S)
                else:
                    left_since = None
                await self._changed.wait(until - now)

    async def report(self, report: Report) -> list[Grant]:
        """Book what happened to a worker's samples; answers with new ones for the slots that came free."""

        def book() -> list[Grant]:
            self._book.book(report)
            if self._manager.round_open and not self._manager.round_complete():
                self._manager.admit()
                return self._manager.claim(report.worker, self.CLAIM_SAMPLES)
            return []

        self._progress.touch()
        return await self._changed.change(book)

    def _retry_later(self, sample_id: str, delay_s: float) -> None:
        async def retry() -> None:
            await asyncio.sleep(delay_s)
            self._progress.touch()
            await self._changed.change(lambda: self._manager.retry(sample_id))

        task = asyncio.create_task(retry())
        self._retries.add(task)
        task.add_done_callback(self._retries.discard)
