"""Unfinished samples: the state of each, its journal, and its owner.

========= ============================= ===============================================
verb      leaves                        enters
========= ============================= ===============================================
enter                                   INTERRUPTED if it has a journal, else WAITING
claim     WAITING, INTERRUPTED          RUNNING
interrupt RUNNING                       INTERRUPTED
leave     RUNNING                       AWAY
come_back AWAY                          INTERRUPTED
finish    RUNNING, AWAY                 FINISHED
fail      RUNNING, AWAY                 FAILED
retry     FAILED                        as ``enter``
mask      FAILED                        FINISHED
release   RUNNING, INTERRUPTED, AWAY    as ``enter``
========= ============================= ===============================================

A sample has one owner: it is claimable, or one worker has it (RUNNING, AWAY), or it awaits its retry, or it has ended.
Only ``Samples`` writes ``Sample.state``, and every verb checks the present state first: a message that comes twice or
late is an error, not a second copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recipe.partial_rollout.manager.failure_policy import FailurePolicy, FailureVerdict, masked_output
from recipe.partial_rollout.manager.groups import Groups
from recipe.partial_rollout.manager.slots import Slots
from recipe.partial_rollout.manager.types import (
    FinishedOutput,
    Grant,
    GroupState,
    PromptGroup,
    Sample,
    SampleState,
    Segment,
)


class Samples:
    """The unfinished samples of ``groups``, in the ``slots`` of the workers or in their queue.

    Args:
        failures: what to do with a sample whose agent loop raised.
        clock: seconds; stamped on state changes for stall reports.
    """

    def __init__(self, groups: Groups, slots: Slots, failures: FailurePolicy, clock: Callable[[], float]) -> None:
        self._groups = groups
        self._slots = slots
        self._failures = failures
        self._clock = clock
        self.unfinished: dict[str, Sample] = {}
        """by id"""

    def __len__(self) -> int:
        return len(self.unfinished)

    def enter(self, group: PromptGroup) -> None:
        """Add the unfinished samples of ``group``, new or restored; any worker may claim them."""
        for sample in group.samples:
            if sample.output is None:
                self.unfinished[sample.id] = sample
                self._requeue(sample)

    def claim(self, worker: str, limit: int | None, *, version: int, overdue: int, beyond_share: bool) -> list[Grant]:
        """Give ``worker`` up to ``limit`` samples, each with a slot; they run under the weights of ``version``.

        Args:
            overdue: groups born at this version or before come first. For the others see ``Slots.claim``.
        """
        claimed = self._slots.claim(worker, limit, len(self), overdue, beyond_share=beyond_share)
        return [self._grant(sample, worker, version) for sample in claimed]

    def _grant(self, sample: Sample, worker: str, version: int) -> Grant:
        assert sample.state in (SampleState.WAITING, SampleState.INTERRUPTED)
        group = sample.group
        if group.state is GroupState.WAITING:
            self._groups.start(group, version)
            self._slots.refresh(group)
        self._groups.counters.resumed += sample.state is SampleState.INTERRUPTED
        # This worker still holds the conversation, so its journal need not be sent at every resumption.
        held = sample.worker == worker
        journals = ((), ()) if held else (tuple(sample.segments), tuple(sample.tool_results))
        sample.worker = worker
        self._move(sample, SampleState.RUNNING)
        return Grant(sample.id, group.uid, group.order, group.prompt.row, *journals, held=held)

    def add_segment(self, sample_id: str, segment: Segment) -> None:
        """Append to the journal of a RUNNING sample."""
        sample = self.in_state(sample_id, "add_segment", SampleState.RUNNING)
        if len(segment):
            sample.segments.append(segment)

    def add_tool_result(self, sample_id: str, result: dict[str, Any]) -> None:
        """Append to the journal of a RUNNING or AWAY sample."""
        self.in_state(sample_id, "add_tool_result", SampleState.RUNNING, SampleState.AWAY).tool_results.append(result)

    def interrupt(self, sample_id: str) -> None:
        """Free its slot; the worker keeps the conversation."""
        sample = self.in_state(sample_id, "interrupt", SampleState.RUNNING)
        self._slots.free(sample)
        self._move(sample, SampleState.INTERRUPTED)
        self._groups.counters.interrupted += 1
        self._slots.offer(sample)

    def leave(self, sample_id: str) -> None:
        """Free its slot; the worker goes on with it, and no token follows until it has come back."""
        sample = self.in_state(sample_id, "leave", SampleState.RUNNING)
        self._slots.leave(sample)
        self._move(sample, SampleState.AWAY)

    def come_back(self, sample_id: str) -> None:
        """Its worker claims it before any other sample."""
        sample = self.in_state(sample_id, "come_back", SampleState.AWAY)
        self._slots.come_back(sample)
        self._move(sample, SampleState.INTERRUPTED)

    def finish(self, sample_id: str, output: FinishedOutput) -> PromptGroup:
        """Free its slot; ``output`` replaces the journal. Returns its group, which may now be complete."""
        return self._end(self._leave_worker(sample_id, "finish"), output)

    def fail(self, sample_id: str, error: str) -> FailureVerdict:
        """Free its slot; nobody owns the sample until ``retry`` or ``mask``, as the verdict says."""
        sample = self._leave_worker(sample_id, "fail")
        sample.worker = None
        sample.failures += 1
        sample.error = error
        self._move(sample, SampleState.FAILED)
        verdict = self._failures.verdict(sample.failures)
        self._groups.counters.failed += 1
        self._groups.counters.retried += verdict is FailureVerdict.RETRY
        return verdict

    def mask(self, sample_id: str) -> PromptGroup:
        """Replace the journal by a masked output; returns the sample's group."""
        sample = self.in_state(sample_id, "mask", SampleState.FAILED)
        self._groups.counters.masked += 1
        return self._end(sample, masked_output(sample.segments, sample.error))

    def retry_delay_s(self, sample_id: str) -> float:
        """Seconds that a FAILED sample waits for its ``retry``."""
        return self._failures.delay_s(self.in_state(sample_id, "retry_delay_s", SampleState.FAILED).failures)

    def retry(self, sample_id: str) -> None:
        """Make the sample claimable; any worker may continue from its journal."""
        self._requeue(self.in_state(sample_id, "retry", SampleState.FAILED))

    def release(self, worker: str) -> int:
        """Requeue the samples of a dead ``worker``; any other may continue from their journals. Returns how many."""
        held = self._slots.release(worker)
        for sample in held:
            assert sample.state in (SampleState.RUNNING, SampleState.INTERRUPTED, SampleState.AWAY)
            self._requeue(sample)
        return len(held)

    def in_state(self, sample_id: str, verb: str, *states: SampleState) -> Sample:
        """The sample, which must be in one of ``states`` for ``verb``.

        Raises:
            RuntimeError: it is not.
        """
        sample = self.unfinished.get(sample_id)
        if sample is None or sample.state not in states:
            actual = "unknown or finished" if sample is None else sample.state
            raise RuntimeError(f"{verb}: sample {sample_id} is {actual}, not {' or '.join(states)}")
        return sample

    def _leave_worker(self, sample_id: str, verb: str) -> Sample:
        sample = self.in_state(sample_id, verb, SampleState.RUNNING, SampleState.AWAY)
        self._slots.free(sample)
        return sample

    def _end(self, sample: Sample, output: FinishedOutput) -> PromptGroup:
        group = sample.group
        self._move(sample, SampleState.FINISHED)
        sample.output = output
        sample.segments, sample.tool_results = [], []
        del self.unfinished[sample.id]
        self._groups.end_sample(group, output.response_length)
        self._slots.refresh(group)
        return group

    def _requeue(self, sample: Sample) -> None:
        """Make ``sample``, which nobody owns now, claimable."""
        sample.worker = None
        self._move(sample, SampleState.INTERRUPTED if sample.has_journal else SampleState.WAITING)
        self._slots.offer(sample)

    def _move(self, sample: Sample, state: SampleState) -> None:
        sample.state = state
        sample.since = self._clock()
