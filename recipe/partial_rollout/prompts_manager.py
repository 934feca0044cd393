"""The state of partial rollout: which prompts are in flight, and where each sample of them stands.

A pure state machine, driven by verbs: no Ray, no asyncio, no torch, no clock of its own. It guarantees that

* every prompt offered is trained exactly once: a group leaves only by ``acknowledge``;
* no group is trained later than ``max_staleness`` versions after its first sample started: ``round_complete`` says no
  while stopping would leave more groups than the coming rounds can train in time;
* a sample has one owner: it is claimable, or one worker has a slot for it, or it awaits its retry, or it has ended.

All of it holds across ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from recipe.partial_rollout import manager_report
from recipe.partial_rollout.admission import Admission, Load
from recipe.partial_rollout.failure_policy import FailurePolicy, FailureVerdict, masked_output
from recipe.partial_rollout.manager_codec import Captured, capture, decode, encode
from recipe.partial_rollout.manager_state import Counters, ManagerState
from recipe.partial_rollout.scheduling import ClaimQueue, Policy
from recipe.partial_rollout.types import (
    Grant,
    GroupState,
    Prompt,
    PromptGroup,
    Sample,
    SampleOutput,
    SampleState,
    Segment,
    TakenGroup,
)


@dataclass(slots=True)
class WorkerSlots:
    """Capacity of one worker; apart from the life of the samples in it."""

    capacity: int
    running: set[str] = field(default_factory=set)

    @property
    def free(self) -> int:
        return self.capacity - len(self.running)


class PromptsManager:
    """Owner of all prompts between the data source and the trainer.

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
        self._queue = ClaimQueue(policy)
        self._state = ManagerState()
        self._workers: dict[str, WorkerSlots] = {}
        self.round_open = False

    @property
    def version(self) -> int:
        """Of the weights that the engines hold."""
        return self._state.version

    @property
    def counters(self) -> Counters:
        """Totals since the start of the run."""
        return self._state.counters

    # -- prompts ---------------------------------------------------------------------------------------------------

    def offer(self, prompts: Iterable[Prompt]) -> None:
        """Put prompts in reserve, in training order; they start when admission allows."""
        state = self._state
        for prompt in prompts:
            if prompt.uid in state.groups or prompt.uid in state.taken:
                raise RuntimeError(f"prompt {prompt.uid} was offered twice")
            state.reserve.append(prompt)

    def close_source(self) -> None:
        """No more prompts will be offered: what is in flight drains."""
        self._state.source_open = False

    @property
    def wanted(self) -> int:
        """Prompts to offer so that the next round never runs short of them."""
        state = self._state
        return max(0, self._admission.most_per_round() - len(state.reserve)) if state.source_open else 0

    def admit(self, *, round_start: bool = False) -> int:
        """Move prompts from the reserve into flight as far as the mode allows; returns how many."""
        state, admitted = self._state, 0
        while state.reserve and self._admission.allows(self._load(), round_start=round_start):
            self._start(state.reserve.popleft())
            admitted += 1
        return admitted

    def _load(self) -> Load:
        state = self._state
        return Load(len(state.groups), state.unfinished_groups, len(state.samples))

    def _start(self, prompt: Prompt) -> None:
        state, n = self._state, self._admission.samples_per_group
        group = PromptGroup(prompt, order=state.counters.admitted_groups, unfinished=n)
        group.samples = [Sample(f"{prompt.uid}#{i}", group, since=self._clock()) for i in range(n)]
        state.enter(group)
        state.lengths.open()
        state.counters.admitted_groups += 1
        state.admitted.append(group.uid)
        for sample in group.samples:
            self._queue.push(sample)

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

    def incarnation(self, worker: str) -> object:
        """Equal for as long as ``worker`` is not released: a call of one that is gone can be told from its successor's.

        Raises:
            RuntimeError: it is not registered, or was released.
        """
        slots = self._workers.get(worker)
        if slots is None:
            raise RuntimeError(f"worker {worker} is not registered: it was released, or never joined")
        return slots

    # -- rounds ----------------------------------------------------------------------------------------------------

    def advance_version(self, version: int) -> None:
        """The engines hold the weights of ``version`` from here on."""
        if version < self.version:
            raise RuntimeError(f"policy version went from {self.version} back to {version}")
        self._state.version = version

    def open_round(self) -> int:
        """Admit what the mode starts a round with, and let workers claim; returns the groups admitted."""
        if self.round_open:
            raise RuntimeError("the round is open already")
        most = min(self._admission.most_per_round(), len(self._state.reserve))
        admitted = self.admit(round_start=True)
        self._state.paced = max(0, most - admitted)
        self.round_open = True
        return admitted

    def close_round(self) -> tuple[str, ...]:
        """No more claims: running samples are about to be interrupted; returns the uids admitted since the last close."""
        self.round_open = False
        admitted, self._state.admitted = tuple(self._state.admitted), []
        return admitted

    def round_complete(self) -> bool:
        """Whether N groups are ready and stopping now leaves every other group trainable in time."""
        size = self._admission.batch_groups
        if len(self._state.ready) < size:
            return self._drained()
        return self._feasible_after(size)

    def _drained(self) -> bool:
        state = self._state
        return not state.source_open and not state.reserve and not state.unfinished_groups

    def _feasible_after(self, size: int) -> bool:
        """Earliest-deadline check: of the groups left, at most j * N may be due within j more rounds."""
        left = Counter({birth: len(groups) for birth, groups in self._state.ready.by_birth.items()})
        to_take = size
        for birth in sorted(left):
            taken = min(to_take, left[birth])
            left[birth] -= taken
            to_take -= taken
        for birth, count in self._state.unfinished.items():
            if birth is not None:
                left[birth] += count
        due = 0
        for birth in sorted(left):
            due += left[birth]
            rounds_left = birth + self._admission.max_staleness - self.version
            if due > max(0, rounds_left) * size:
                return False
        return True

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
        sample.worker = worker
        self._enter(sample, SampleState.RUNNING)
        journals = tuple(sample.segments), tuple(sample.tool_results)
        return Grant(sample.id, group.uid, group.order, group.prompt.row, *journals)

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
            self._end(sample, masked_output(sample.segments))
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

    # -- batches ---------------------------------------------------------------------------------------------------

    def take_batch(self) -> list[TakenGroup]:
        """The N oldest ready groups, READY -> TAKEN; fewer only when the data has run out."""
        state, size = self._state, self._admission.batch_groups
        if len(state.ready) < size and not self._drained():
            raise RuntimeError(f"take_batch: {len(state.ready)} groups are ready, {size} are needed")
        batch = state.ready.take(size)
        for group in batch:
            group.handed_over = GroupState.TAKEN
            state.taken[group.uid] = state.groups.pop(group.uid)
        return [self._view(group) for group in batch]

    @staticmethod
    def _view(group: PromptGroup) -> TakenGroup:
        outputs = tuple(sample.output for sample in group.samples if sample.output is not None)
        return TakenGroup(group.uid, group.order, group.prompt.epoch, group.prompt.row, outputs, group.birth)

    def acknowledge(self, uids: Iterable[str]) -> None:
        """TAKEN -> TRAINED: the trainer has updated on these groups, and they are forgotten."""
        state = self._state
        for uid in uids:
            group = state.taken.pop(uid, None)
            if group is None:
                raise RuntimeError(f"acknowledge: group {uid} was not taken")
            group.handed_over = GroupState.TRAINED
            del state.by_order[group.order]
            state.counters.trained_groups += 1
            state.counters.trained_tokens += group.finished_length
        state.lengths.fold(state.counters.trained_groups)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def capture(self) -> Captured:
        """What ``state_dict`` says of this moment, cheap: ``encode`` makes the rest of it, anywhere and later."""
        return capture(self._state, self._admission)

    def state_dict(self) -> dict[str, Any]:
        """All but the workers, in plain Python and numpy; layout in ``manager_codec``."""
        return encode(self.capture())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``: unfinished samples are claimable, groups with the trainer are ready again.

        Raises:
            ValueError: made with another batch or group size, or a larger ``max_staleness`` than this run allows.
            RuntimeError: this manager has prompts already.
        """
        if self._state.reserve or self.counters.admitted_groups:
            raise RuntimeError("load_state_dict: the manager has prompts already; load before the first offer")
        self._state = decode(state, self._admission)
        for sample in self._state.samples.values():
            self._requeue(sample)

    # -- observation -----------------------------------------------------------------------------------------------

    @property
    def lost_groups(self) -> int:
        """Groups admitted that nobody has and that were not trained: always 0."""
        return self._state.lost_groups

    @property
    def cached_tokens(self) -> int:
        """Response tokens of every sample in flight or with the trainer."""
        return self._state.cached_tokens

    @property
    def carried_groups(self) -> int:
        """Groups in flight that have started."""
        return self._state.carried_groups

    def length_bias(self) -> tuple[float, float]:
        """See ``manager_report.length_bias``."""
        return manager_report.length_bias(self._state, self._admission.samples_per_group)

    def metrics(self) -> dict[str, float]:
        """See ``manager_report.gauges``."""
        return manager_report.gauges(self._state, self._admission.samples_per_group)

    def unfinished_report(self, limit: int = 8) -> str:
        """See ``manager_report.unfinished_report``."""
        return manager_report.unfinished_report(self._state, self._clock(), limit)
