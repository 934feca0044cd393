"""The life of samples: claimed by workers, interrupted and resumed, finished, failed and retried.

A sample has one owner: it is claimable, or one worker has a slot for it, or it awaits its retry, or it has ended. Every
verb checks the state that it leaves, so a message that comes twice or late is an error and not a second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from recipe.partial_rollout.admission import Admission
from recipe.partial_rollout.failure_policy import FailurePolicy, FailureVerdict, masked_output
from recipe.partial_rollout.manager_state import Counters, ManagerState
from recipe.partial_rollout.scheduling import ClaimQueue, Policy
from recipe.partial_rollout.types import Grant, PromptGroup, Sample, SampleOutput, SampleState, Segment


@dataclass(slots=True)
class WorkerSlots:
    """Capacity of one worker; apart from the life of the samples in it."""

    capacity: int
    running: set[str] = field(default_factory=set)

    @property
    def free(self) -> int:
        return self.capacity - len(self.running)


class SampleLifecycle:
    """The verbs of workers and samples; ``PromptsManager`` adds those of prompts, rounds, batches and checkpoints.

    Args:
        admission: mode and sizes.
        policy: order in which samples are claimed.
        clock: seconds; stamped on state changes for stall reports.
        failures: what becomes of a sample whose agent loop raised.
    """

    def __init__(
        self,
        admission: Admission,
        policy: Policy,
        clock: Callable[[], float],
        failures: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
    ) -> None:
        self._admission = admission
        self._clock = clock
        self._failures = failures
        self._policy = policy
        self._queue = ClaimQueue(policy)
        self._state = ManagerState()
        self._workers: dict[str, WorkerSlots] = {}
        self.round_open = False

    @property
    def version(self) -> int:
        """Of the weights that decode what is claimed."""
        return self._state.version

    @property
    def counters(self) -> Counters:
        """Totals since the start of the run."""
        return self._state.counters

    # -- workers ---------------------------------------------------------------------------------------------------

    def register_worker(self, worker: str, capacity: int) -> None:
        """Declare a worker that can run ``capacity`` samples at once."""
        if capacity < 1:
            raise ValueError(f"capacity of {worker} is {capacity}; it must be at least 1")
        if worker in self._workers:
            raise RuntimeError(f"worker {worker} is registered already")
        self._workers[worker] = WorkerSlots(capacity)

    def release_worker(self, worker: str) -> int:
        """Forget a dead worker and requeue what it held for the others; returns the number of samples.

        A sample goes on from its cached segments; what the worker had not handed in is generated again.
        """
        slots = self._workers.pop(worker, None)
        if slots is None:
            return 0
        held = [self._state.samples[i] for i in slots.running] + self._queue.drain(worker)
        for sample in held:
            self._requeue(sample)
        return len(held)

    @property
    def workers(self) -> Iterable[str]:
        """Those that have joined and were not released."""
        return self._workers

    def incarnation(self, worker: str) -> object:
        """Equal for as long as ``worker`` is not released: a call of one that is gone can be told from its successor's.

        Raises:
            RuntimeError: it is not registered, or was released.
        """
        slots = self._workers.get(worker)
        if slots is None:
            raise RuntimeError(f"worker {worker} is not registered: it was released, or never joined")
        return slots

    # -- samples ---------------------------------------------------------------------------------------------------

    def claim(self, worker: str, limit: int | None = None) -> list[Grant]:
        """Give ``worker`` up to ``limit`` samples (default: all its free slots), in priority order; RUNNING."""
        self.incarnation(worker)
        slots = self._workers[worker]
        grants: list[Grant] = []
        room = slots.free if limit is None else min(limit, slots.free)
        overdue_birth = self.version - self._admission.max_staleness
        while self.round_open and len(grants) < room:
            sample = self._queue.pop(worker, overdue_birth)
            if sample is None:
                break
            grants.append(self._grant(sample, worker))
            slots.running.add(sample.id)
        return grants

    def _grant(self, sample: Sample, worker: str) -> Grant:
        group = sample.group
        if group.birth is None:
            group.birth = self.version
            self._state.unfinished[None] -= 1
            self._state.unfinished[group.birth] += 1
            self._queue.refresh(group)
        if sample.state is SampleState.INTERRUPTED:
            self.counters.resumed += 1
        # Its own worker still holds the conversation: thousands of journals need not travel to it at every resumption.
        held = sample.worker == worker
        journals = ((), ()) if held else (tuple(sample.segments), tuple(sample.tool_results))
        sample.worker = worker
        self._enter(sample, SampleState.RUNNING)
        return Grant(sample.id, group.uid, group.order, group.prompt.row, *journals, held=held)

    def add_segment(self, sample_id: str, segment: Segment) -> None:
        """Cache tokens of a running sample, so that they survive its worker."""
        sample = self._running(sample_id, "add_segment")
        if len(segment):
            sample.segments.append(segment)

    def add_tool_result(self, sample_id: str, result: dict[str, Any]) -> None:
        """Cache the JSON-able result of a running sample's finished tool call: it is not made again."""
        self._running(sample_id, "add_tool_result").tool_results.append(result)

    def interrupt(self, sample_id: str) -> None:
        """RUNNING -> INTERRUPTED: the slot is free, the worker keeps the conversation until it is granted again."""
        sample = self._running(sample_id, "interrupt")
        self._free_slot(sample)
        self._enter(sample, SampleState.INTERRUPTED)
        self.counters.interrupted += 1
        self._queue.push(sample)

    def finish(self, sample_id: str, output: SampleOutput) -> None:
        """RUNNING -> FINISHED with its output; the group is READY after its last one."""
        sample = self._running(sample_id, "finish")
        self._free_slot(sample)
        self._end(sample, output)

    def _end(self, sample: Sample, output: SampleOutput) -> None:
        group = sample.group
        self._enter(sample, SampleState.FINISHED)
        sample.output = output
        sample.segments, sample.tool_results = [], []
        del self._state.samples[sample.id]
        group.unfinished -= 1
        group.finished_length += output.response_length
        if group.unfinished:
            self._queue.refresh(group)
        else:
            self._make_ready(group)

    def _make_ready(self, group: PromptGroup) -> None:
        unfinished = self._state.unfinished
        unfinished[group.birth] -= 1
        if not unfinished[group.birth]:
            del unfinished[group.birth]
        self._state.ready.add(group)
        self._state.lengths.close(group.order, group.finished_length)

    def fail(self, sample_id: str, error: str) -> FailureVerdict:
        """RUNNING -> FAILED: its agent loop raised ``error`` (one line).

        Returns:
            RETRY: ``retry`` is to be called after ``retry_delay_s``. MASK: the sample has FINISHED with a masked
            output. RAISE: the run is to end.
        """
        sample = self._running(sample_id, "fail")
        self._free_slot(sample)
        sample.worker = None
        sample.failures += 1
        sample.error = error
        self._enter(sample, SampleState.FAILED)
        self.counters.failed += 1
        verdict = self._failures.verdict(sample.failures)
        if verdict is FailureVerdict.RETRY:
            self.counters.retried += 1
        elif verdict is FailureVerdict.MASK:
            self.counters.masked += 1
            self._end(sample, masked_output(sample.segments, error))
        return verdict

    def retry_delay_s(self, sample_id: str) -> float:
        """Seconds that a failed sample waits for its ``retry``."""
        return self._failures.delay_s(self._in_state(sample_id, SampleState.FAILED, "retry_delay_s").failures)

    def retry(self, sample_id: str) -> None:
        """FAILED -> INTERRUPTED with its journal (WAITING without one); any worker may claim it."""
        self._requeue(self._in_state(sample_id, SampleState.FAILED, "retry"))

    def _running(self, sample_id: str, verb: str) -> Sample:
        return self._in_state(sample_id, SampleState.RUNNING, verb)

    def _in_state(self, sample_id: str, state: SampleState, verb: str) -> Sample:
        sample = self._state.samples.get(sample_id)
        if sample is None or sample.state is not state:
            actual = "unknown or finished" if sample is None else sample.state
            raise RuntimeError(f"{verb}: sample {sample_id} is {actual}, not {state}")
        return sample

    def _requeue(self, sample: Sample) -> None:
        """Nobody owns ``sample``: any worker may go on from its journal."""
        sample.worker = None
        self._enter(sample, SampleState.INTERRUPTED if sample.has_journal else SampleState.WAITING)
        self._queue.push(sample)

    def _free_slot(self, sample: Sample) -> None:
        assert sample.worker is not None
        self._workers[sample.worker].running.discard(sample.id)

    def _enter(self, sample: Sample, state: SampleState) -> None:
        sample.state = state
        sample.since = self._clock()
