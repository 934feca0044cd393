"""``PromptsManager`` behind Ray: adds waiting, deadlines and failure propagation; it makes no decisions.

The actor runs its methods in one asyncio event loop: another method runs only while one awaits, so no lock guards the
state. ``claim`` waits for work, ``wait_batch`` for the batch, and every change of the state wakes both. Both raise the
first failure that is reported. The driver calls these methods in each step::

    begin_version ----> wait_batch ----> batch ----> finish_step
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from recipe.partial_rollout.checkpoint.manifest import read_snapshot, write_snapshot
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.codec import capture, encode, restore
from recipe.partial_rollout.manager.policies import FailureVerdict, retry_delay_s
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.scheduling import POLICY
from recipe.partial_rollout.manager.types import (
    Added,
    Failed,
    Finished,
    Interrupted,
    Lease,
    Parked,
    Prompt,
    ReadyBatch,
    Report,
    RolloutFailedError,
    RoundProgress,
    SampleOutput,
    SampleState,
    StepSummary,
)
from recipe.partial_rollout.waits import ErrorText, one_line

logger = logging.getLogger(__name__)


class ManagerActor:
    """Ray actor (``ray.remote(ManagerActor)``) around one ``PromptsManager``.

    Args:
        settings: the run's settings.
        store: keeps the outputs of READY groups in Ray's object store.
        train_groups: number of groups that the whole training trains; None: no limit (``Admission``).
    """

    CLAIM_WAIT_S = 20.0
    """seconds after which ``claim`` returns an empty list. The worker calls again, which fails if the manager died"""
    CLAIM_SAMPLES = 512
    """most samples that one answer leases, so that the first of 100,000 samples start before the last are leased"""

    def __init__(
        self,
        settings: PartialRolloutConfig,
        store: RayObjects,
        train_groups: int | None = None,
    ) -> None:
        self._changed = asyncio.Event()
        """set at the next change of the state, and then replaced by a new event"""
        self._failure: str | None = None
        """the first failure that ends the run; every present and later wait raises it"""
        self._stall_s = settings.deadlines.stall_s
        self._parked_s = max(self._stall_s, settings.parked_s or 0.0)
        """deadline (s) of a stall while samples are parked: the longest deadline of a tool or reward, at least
        ``stall_s``; ``stall_s`` where tools have no deadline"""
        self._moved_at = time.monotonic()
        """monotonic clock (s) of the last progress: a report, an engine's token, a retry, or the start of
        ``wait_batch``"""
        self._store = store
        self._manager = PromptsManager(settings, time.monotonic, train_groups, store.put)
        self._policy = settings.scheduling.policy
        self._carried = 0
        """groups carried into the version: ACTIVE or READY when it began"""
        self._errors: dict[tuple[str, str], ErrorText] = {}
        """by kind (``ErrorText.kind``): the first error of that kind that workers have reported"""
        self._new_errors: list[ErrorText] = []
        """those of ``_errors`` that the present step added"""
        self._batch: ReadyBatch | None = None
        """batch that ``wait_batch`` took and ``batch`` has not returned"""
        self._gauges: dict[str, float] = {}
        """``PromptsManager.gauges``, read when the batch was taken, before the next version began"""

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Wake everyone who waits, because the state has changed."""
        # A new event instead of a cleared one: whoever awaits the old one finds it set, however late it runs.
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_at_most(self, timeout_s: float) -> None:
        """Wait until something changes or ``timeout_s`` pass."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def _raise_failure(self) -> None:
        if self._failure is None and (problem := self._manager.slots.queue.problem) is not None:
            self._failure = f"{POLICY}={self._policy}: {problem}"
        if self._failure is not None:
            raise RolloutFailedError(self._failure)

    def _stall_left_s(self) -> float:
        """Return the seconds until the round counts as stalled.

        Raises:
            RolloutFailedError: the round has stalled, and no sample waits for its retry.
        """
        parked, idle_s = self._manager.samples.parked, time.monotonic() - self._moved_at
        limit_s = self._parked_s if parked else self._stall_s
        # A backoff may be longer than the deadline. The samples are searched only once it has passed.
        if idle_s >= limit_s and not any(
            sample.state is SampleState.FAILED for sample in self._manager.samples.unfinished.values()
        ):
            excuse = f"{limit_s:g} s while samples await a tool or reward, whose longest deadline that is; {parked} do"
            raise RolloutFailedError(
                f"no sample reported and no engine made a token for {idle_s:.0f} s "
                f"(partial_rollout.deadlines.stall_s={self._stall_s:g}"
                f"{f'; {excuse}' if limit_s > self._stall_s else ''}); "
                f"{self._manager.samples.report()}"
            )
        return limit_s - idle_s

    # -- driver ----------------------------------------------------------------------------------------------------

    async def wanted(self) -> int:
        """Return the number of prompts that the driver should enqueue now (``PromptsManager.wanted``)."""
        return self._manager.wanted

    async def enqueue(self, prompts: list[Prompt], source_left: int) -> None:
        """Put prompts that replace filtered groups into the backlog, and admit what is allowed."""
        self._manager.backlog.enqueue(prompts, source_left)
        if self._manager.round_open and not self._manager.round_complete():
            self._manager.admit()
        self._wake()

    async def begin_version(self, version: int, prompts: list[Prompt], source_left: int) -> bool:
        """Begin ``version``: its groups are admitted, and workers may claim.

        In colocated placement the trainer may still be updating. Claimed samples then wait at their workers' gates
        until the engines have loaded ``version``. An interrupted sample keeps its slot until its worker reports the
        interruption; the worker then claims it before any new prompt.

        Args:
            source_left: prompts that remain in the source after ``prompts``.

        Returns:
            True if the version did not begin, because the data ended with fewer prompts left than a batch needs.

        Raises:
            RuntimeError: see ``PromptsManager.begin_version``.
            RolloutFailedError: something has failed.
        """
        self._raise_failure()
        manager = self._manager
        allow_full_collections()
        # Counted before admission: groups that start in this version are not carried into it.
        manager.backlog.enqueue(prompts, source_left)
        self._carried = manager.groups.carried
        if not manager.exhausted:
            manager.begin_version(version)
            self._wake()
        return manager.exhausted

    async def wait_batch(self, stop: bool) -> bool:
        """Wait until the batch of this version is complete, and take it; ``batch`` then returns it.

        With ``stop`` (colocated) no sample can be claimed once the batch is taken. Without it samples run on, and
        prompts are admitted if the mode allows. Returns False without a batch in two cases: dynamic sampling runs low
        on prompts in the backlog, so the caller must ``enqueue`` the ``wanted`` prompts and call again; or the rollout
        was suspended.

        If the driver stops before the answer arrives, nothing is lost: a checkpoint restores the taken groups as READY.

        Raises:
            RuntimeError: the batch of this version was taken already, the round was suspended, or no version has begun.
            RolloutFailedError: something failed, or the round stalled (``partial_rollout.deadlines.stall_s``).
        """
        manager = self._manager
        self._raise_failure()
        manager.require_open("wait_batch")
        postpone_full_collections()
        # Where the round is stopped, the version begins before the trainer's update, and nothing moves during that.
        self._moved_at = time.monotonic()
        while not manager.round_complete():
            if manager.short_of_prompts or not manager.round_open:
                return False
            # Not below 0.1 s: nothing is left of the deadline while a sample waits for its retry, and the loop would spin.
            await self._wait_at_most(max(0.1, self._stall_left_s()))
            self._raise_failure()
        decided_at = time.time()
        groups = manager.take_batch(stop=stop)
        # After the batch is taken and before prompts replace it: the figures are of what stays in flight.
        self._gauges = manager.gauges()
        if not stop:
            manager.admit()
            self._wake()
        self._batch = ReadyBatch(decided_at, groups, self._carried)
        return True

    async def batch(self) -> ReadyBatch:
        """Return the batch that ``wait_batch`` took.

        A call of its own, because the engines decode until the driver has the answer of ``wait_batch``, and a batch of
        50,000 samples is 0.3 s on its way.

        Raises:
            RuntimeError: ``wait_batch`` took none, or this batch was returned before.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError("batch: no batch is taken: call wait_batch first")
        return batch

    async def finish_step(self) -> StepSummary:
        """Mark the batch's groups as TRAINED and return the step's summary.

        Call it after the trainer's update; in colocated placement only once all workers have reported the interrupted
        samples.
        """
        # Here, because interrupted samples have reported by now, and the batch's groups are still TAKEN.
        metrics = self._manager.metrics() | self._gauges
        admitted, filtered = self._manager.groups.train()
        errors, self._new_errors = tuple(self._new_errors), []
        return StepSummary(admitted, filtered, metrics, errors)

    async def suspend(self) -> None:
        """End the round without a batch, to checkpoint and stop: no sample can be claimed from here on."""
        self._manager.suspend()
        self._wake()

    async def progress(self, decoded: bool = False) -> RoundProgress:
        """Return how far the round is. It answers at once and wakes nobody.

        Args:
            decoded: whether an engine has made tokens since the last call. They count as progress against a stall, even
                if no worker has reported them yet.
        """
        if decoded:
            self._moved_at = time.monotonic()
        manager = self._manager
        oldest = manager.version - manager.groups.oldest_birth(default=manager.version)
        return RoundProgress(len(manager.groups.ready_queue), manager.samples.running.total(), oldest)

    def _fail(self, reason: str) -> None:
        # The first failure is the cause; what fails after it fails because of it.
        self._failure = self._failure or reason
        self._wake()

    async def first_errors(self) -> list[str]:
        """Return the tracebacks of the errors that workers have reported, the first of each kind (type and place)."""
        return [error.traceback for error in self._errors.values()]

    # -- checkpoints -----------------------------------------------------------------------------------------------

    async def save(self, path: str) -> None:
        """Write the present state to ``path``; samples may run, and what they report later is not part of it.

        Raises:
            UnsaveableError: a dataset row or an output holds a value that cannot be saved; the message names it.
            RolloutFailedError, TimeoutError: outputs are lost, or do not arrive.
        """
        # Captured between two awaits, so it is one moment. To encode and write it takes seconds: a thread does that.
        captured = capture(self._manager)
        await asyncio.to_thread(lambda: write_snapshot(Path(path), encode(captured, self._store.fetch)))

    async def load(self, path: str) -> None:
        """Restore the snapshot at ``path``, before the first version."""
        restore(self._manager, await asyncio.to_thread(read_snapshot, Path(path)))

    # -- workers ---------------------------------------------------------------------------------------------------

    async def register_worker(self, worker: str, capacity: int) -> None:
        """Add a worker with ``capacity`` slots."""
        self._manager.slots.register(worker, capacity)

    async def resize_workers(self, capacity: int) -> None:
        """Give every worker ``capacity`` slots from here on."""
        slots = self._manager.slots
        slots.workers = dict.fromkeys(slots.workers, capacity)
        self._wake()

    async def release_worker(self, worker: str) -> int:
        """Requeue the samples of a worker that is gone, and return how many they were."""
        requeued = self._manager.release_worker(worker)
        self._wake()
        return requeued

    async def claim(self, worker: str) -> list[Lease]:
        """Wait for samples to run, and lease them to ``worker``; return an empty list if none came in ``CLAIM_WAIT_S``.

        Raises:
            RuntimeError: the worker was released.
            RolloutFailedError: something has failed.
        """
        until = time.monotonic() + self.CLAIM_WAIT_S
        while True:
            # In the loop: the worker may have been released, or the run have failed, while it waited.
            self._raise_failure()
            if leases := self._manager.claim(worker, self.CLAIM_SAMPLES):
                return leases
            if (left_s := until - time.monotonic()) <= 0:
                return []
            await self._wait_at_most(left_s)

    async def report(self, report: Report) -> list[Lease]:
        """Apply the events of a worker's samples, and return leases for the slots that came free."""
        # Whatever it says, a report shows that the round has not stalled.
        self._moved_at = time.monotonic()
        self._apply(report)
        leases = []
        if self._manager.round_open and not self._manager.round_complete():
            self._manager.admit()
            # In the answer, so that a free slot does not wait for one more round trip. Once the batch is complete, a sample
            # that starts would only be interrupted.
            leases = self._manager.claim(report.worker, self.CLAIM_SAMPLES)
        self._wake()
        return leases

    def _apply(self, report: Report) -> None:
        """Apply ``report``: its errors, its fatal error, its events in order, and its count of rescored rewards.

        Raises:
            RuntimeError: the worker is not registered, or was released. Or an event does not fit the state of its sample,
                for example because the report came twice. It is not checked that the sample runs on this worker.
        """
        self._manager.slots.require(report.worker)
        for error in report.errors:
            if error.kind not in self._errors:
                self._errors[error.kind] = error
                self._new_errors.append(error)
        if report.fatal is not None:
            self._fail(report.fatal)
        for event in report.events:
            match event:
                case Added(sample_id, segments):
                    self._manager.add(sample_id, segments)
                case Parked(sample_id):
                    self._manager.park(sample_id)
                case Interrupted(sample_id):
                    self._manager.interrupt(sample_id)
                case Finished(sample_id, output):
                    self._manager.finish(sample_id, output)
                case Failed(sample_id, error, times):
                    self._fail_sample(report.worker, sample_id, error, times)
                case _:
                    assert_never(event)
        self._manager.counters.failed += report.rescored

    def _fail_sample(self, worker: str, sample_id: str, error: str, times: int) -> None:
        verdict = self._manager.fail(sample_id, error, times)
        logger.warning("sample %s on %s failed: %s (verdict: %s)", sample_id, worker, error, verdict)
        if verdict is FailureVerdict.RETRY:
            delay_s = retry_delay_s(self._manager.samples.unfinished[sample_id].failures)
            asyncio.get_running_loop().call_later(delay_s, self._retry, sample_id)
        elif verdict is FailureVerdict.RAISE:
            self._fail(
                f"sample {sample_id} failed on {worker}, and partial_rollout.failures.sample_retries=null ends the run "
                f"at its first failure: {error}"
            )

    def _retry(self, sample_id: str) -> None:
        # It could not report while it waited.
        self._moved_at = time.monotonic()
        self._manager.retry(sample_id)
        self._wake()


class RayObjects:
    """Keeps the outputs of READY groups in Ray's object store until the trainer fetches them; one object a group.

    The manager needs no tokens, so it keeps only Ray's reference to each object. Only the manager calls ``put``: an
    object dies with the process that put it, and a worker may die before its samples are trained. Any process that has
    the references may call ``fetch``. Ray frees an object once the group is trained and the manager drops the
    reference.

    Args:
        deadline_s: seconds that one ``fetch`` may take.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def put(self, outputs: Sequence[SampleOutput]) -> Any:
        """Put the outputs of a group into Ray's object store, and return the reference.

        Ray keeps objects under 100 KB in the memory of this process, the manager's, so they are lost with it.
        """
        return ray.put(outputs)

    def fetch(self, stored: Mapping[str, Any]) -> dict[str, Sequence[SampleOutput]]:
        """Fetch the outputs of the groups in ``stored`` (uid to reference), by uid. Blocks until they are there.

        Arrays from objects above 100 KB are read-only views of the store.

        Raises:
            RolloutFailedError: outputs were lost with the node that stored them, or with the manager.
            TimeoutError: they did not arrive within the deadline.
        """
        try:
            outputs = ray.get(list(stored.values()), timeout=self._deadline_s)
        except GetTimeoutError:
            raise TimeoutError(
                f"fetching the outputs of {len(stored)} groups took more than {self._deadline_s:g} s "
                "(partial_rollout.deadlines.interrupt_s)"
            ) from None
        except ObjectLostError as error:
            raise RolloutFailedError(
                "outputs of groups are lost; resume from the last checkpoint (trainer.resume_mode=auto): "
                f"{one_line(error)}"
            ) from error
        return dict(zip(stored, outputs, strict=True))


# -- garbage -----------------------------------------------------------------------------------------------------------

# A full collection visits every object of the process. With 50,000 samples it took 1 to 3 s, at unpredictable moments, in
# which the manager handled no report and filled no slot (``bench scale`` at 1,024 replicas). While the trainer updates,
# nobody waits for the manager, so full collections wait for the end of the round.
_USUAL = gc.get_threshold()
_NEVER = 2**31 - 1


def postpone_full_collections() -> None:
    """Stop automatic full garbage collections, because a round begins.

    Ray may still request one. It skips the objects that exist now (``gc.freeze``).
    """
    gc.freeze()
    gc.set_threshold(*_USUAL[:2], _NEVER)


def allow_full_collections() -> None:
    """Let Python run full garbage collections again, because the round is over."""
    gc.unfreeze()
    gc.set_threshold(*_USUAL)
