"""The life of samples: claimed by workers, interrupted and resumed, finished, failed and retried.

A sample has one owner: it is claimable, or one worker has a slot for it, or it awaits its retry, or it has ended. Every
verb checks the state that it leaves, so a message that comes twice or late is an error and not a second copy.

Workers share the samples by their slots: of those that any worker could run, a worker claims no more than leaves it with
its fair share of all. While such a sample is left, some worker is below its share and has a free slot, or all slots are
taken; so when every worker has claimed, no slot is free that could be filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from recipe.partial_rollout.config.choices import SchedulingPolicy
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.failure_policy import FailurePolicy, FailureVerdict, masked_output
from recipe.partial_rollout.manager.group_filter import GroupFilter
from recipe.partial_rollout.manager.scheduling import ClaimQueue
from recipe.partial_rollout.manager.state import Counters, ManagerState
from recipe.partial_rollout.manager.types import (
    FilteredGroup,
    FinishedOutput,
    Grant,
    GroupState,
    PromptGroup,
    Sample,
    SampleState,
    Segment,
)


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
        group_filter: which finished groups are replaced; None: none.
    """

    def __init__(
        self,
        admission: Admission,
        policy: SchedulingPolicy,
        clock: Callable[[], float],
        failures: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
        group_filter: GroupFilter | None = None,
    ) -> None:
        self._admission = admission
        self._clock = clock
        self._failures = failures
        self._group_filter = group_filter
        self._policy = policy
        self._queue = ClaimQueue(policy)
        self._state = ManagerState()
        self._workers: dict[str, WorkerSlots] = {}
        self._capacity = 0
        self.round_open = False
        self._source_left = 0
        """prompts that the source has yet to offer, as it said last; dynamic sampling alone asks"""
        self._filtered_this_round = 0
        self._to_replace = 0
        """groups filtered in this round for which no other was admitted"""

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
        self._capacity += capacity

    def resize_worker(self, worker: str, capacity: int) -> None:
        """``worker`` can run ``capacity`` samples at once from here on; what it runs goes on."""
        if capacity < 1:
            raise ValueError(f"capacity of {worker} is {capacity}; it must be at least 1")
        self.incarnation(worker)
        self._capacity += capacity - self._workers[worker].capacity
        self._workers[worker].capacity = capacity

    def release_worker(self, worker: str) -> int:
        """Forget a dead worker and requeue what it held for the others; returns the number of samples.

        A sample goes on from its cached segments; what the worker had not handed in is generated again.
        """
        slots = self._workers.pop(worker, None)
        if slots is None:
            return 0
        self._capacity -= slots.capacity
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

    def claim(self, worker: str, limit: int | None = None, *, beyond_share: bool = False) -> list[Grant]:
        """Give ``worker`` up to ``limit`` samples (default: all its free slots), in priority order; RUNNING.

        Of the samples that any worker could run it gets those up to its share, and overdue ones.

        Args:
            beyond_share: also a part of those that are left for the other workers, because they do not claim them.
        """
        self.incarnation(worker)
        slots = self._workers[worker]
        grants: list[Grant] = []
        room = slots.free if limit is None else min(limit, slots.free)
        overdue_birth = self.version - self._admission.max_staleness
        shared = self._below_share(worker)
        if beyond_share:
            shared = max(shared, math.ceil(self._queue.size(None) / len(self._workers)))
        while self.round_open and len(grants) < room:
            sample = self._queue.pop(worker, overdue_birth, own_only=shared <= 0)
            if sample is None:
                break
            shared -= sample.worker != worker
            grants.append(self._grant(sample, worker))
            slots.running.add(sample.id)
        return grants

    def _below_share(self, worker: str) -> int:
        """Samples that ``worker`` lacks to its fair share, by slots, of all that are unfinished."""
        slots = self._workers[worker]
        share = math.ceil(len(self._state.samples) * slots.capacity / self._capacity)
        return share - len(slots.running) - self._queue.size(worker)

    def leaves_samples_to_others(self, worker: str) -> bool:
        """Whether ``worker`` has free slots for samples that it did not get because it has its share."""
        return self.round_open and self._workers[worker].free > 0 and self._queue.size(None) > 0

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

    def finish(self, sample_id: str, output: FinishedOutput) -> None:
        """RUNNING -> FINISHED with its output; the group is READY, or FILTERED, after its last one.

        Raises:
            MissingMetricError: the group cannot be judged by ``algorithm.filter_groups``.
        """
        sample = self._running(sample_id, "finish")
        self._free_slot(sample)
        self._end(sample, output)

    def _end(self, sample: Sample, output: FinishedOutput) -> None:
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
            self._end_group(group)

    def _end_group(self, group: PromptGroup) -> None:
        unfinished = self._state.unfinished
        unfinished[group.birth] -= 1
        if not unfinished[group.birth]:
            del unfinished[group.birth]
        value = self._common_value(group)
        if value is not None and self._may_filter():
            self._filter(group, value)
            return
        self.counters.spared_groups += value is not None
        self._state.ready.add(group)
        self._state.lengths.close(group.order, group.finished_length)

    def _common_value(self, group: PromptGroup) -> float | None:
        if self._group_filter is None:
            return None
        return self._group_filter.common_value([s.output for s in group.samples if s.output is not None])

    def _may_filter(self) -> bool:
        """Whether the round's limit allows one more, and the data a batch without it."""
        assert self._group_filter is not None
        state, size = self._state, self._admission.batch_groups
        most = self._group_filter.most_a_round(size)
        if most is not None and self._filtered_this_round >= most:
            return False
        return len(state.groups) - 1 + len(state.reserve) + self._source_left >= size

    def _filter(self, group: PromptGroup, value: float) -> None:
        """ACTIVE -> FILTERED: consumed without being trained; in an open round another group takes its place."""
        state = self._state
        group.handed_over = GroupState.FILTERED
        del state.groups[group.uid], state.by_order[group.order]
        state.lengths.leave_out(group.order)
        lengths = [sample.length for sample in group.samples]
        state.filtered.append(FilteredGroup(group.uid, group.order, group.birth, value, lengths))
        self.counters.filtered_groups += 1
        self.counters.filtered_tokens += group.finished_length
        group.drop_outputs()
        self._filtered_this_round += 1
        self._to_replace += self.round_open

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
