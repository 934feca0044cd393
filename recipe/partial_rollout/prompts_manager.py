"""The state of partial rollout: which prompts are in flight, and where each sample of them stands.

A pure state machine, driven by verbs: no Ray, no asyncio, no torch, no clock of its own. It guarantees that

* every prompt offered is trained exactly once: a group leaves only by ``acknowledge``;
* no group is trained later than ``max_staleness`` versions after its first sample started: ``round_complete`` says no
  while stopping would leave more groups than the coming rounds can train in time;
* a sample has one owner: it is claimable, or one worker has a slot for it, or it has ended.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from recipe.partial_rollout.admission import Admission, Load
from recipe.partial_rollout.length_ledger import LengthLedger
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


@dataclass(slots=True)
class Counters:
    """Totals since the start of the run; they only grow."""

    admitted_groups: int = 0
    trained_groups: int = 0
    interrupted: int = 0
    resumed: int = 0
    failed: int = 0


class PromptsManager:
    """Owner of all prompts between the data source and the trainer.

    Args:
        admission: mode and sizes.
        policy: order in which samples are claimed.
        clock: seconds; stamped on state changes for stall reports.
    """

    def __init__(self, admission: Admission, policy: Policy, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._clock = clock
        self._queue = ClaimQueue(policy)
        self._reserve: deque[Prompt] = deque()
        self._source_open = True
        self._groups: dict[str, PromptGroup] = {}
        self._samples: dict[str, Sample] = {}
        self._workers: dict[str, WorkerSlots] = {}
        self._unfinished: Counter[int | None] = Counter()
        self._ready: dict[int, deque[PromptGroup]] = {}
        self._ready_count = 0
        self._taken: dict[str, PromptGroup] = {}
        self._by_order: dict[int, PromptGroup] = {}
        self._unfinished_samples = 0
        self._trained_tokens = 0
        self._lengths = LengthLedger()
        self.version = 0
        self.round_open = False
        self.counters = Counters()

    # -- prompts ---------------------------------------------------------------------------------------------------

    def offer(self, prompts: Iterable[Prompt]) -> None:
        """Put prompts in reserve, in training order; they start when admission allows."""
        for prompt in prompts:
            if prompt.uid in self._groups or prompt.uid in self._taken:
                raise RuntimeError(f"prompt {prompt.uid} was offered twice")
            self._reserve.append(prompt)

    def close_source(self) -> None:
        """No more prompts will be offered: what is in flight drains."""
        self._source_open = False

    @property
    def wanted(self) -> int:
        """Prompts to offer so that the next round never runs short of them."""
        return max(0, self._admission.most_per_round() - len(self._reserve)) if self._source_open else 0

    def admit(self, *, round_start: bool = False) -> int:
        """Move prompts from the reserve into flight as far as the mode allows; returns how many."""
        admitted = 0
        while self._reserve and self._admission.allows(self._load(), round_start=round_start):
            self._start(self._reserve.popleft())
            admitted += 1
        return admitted

    def _load(self) -> Load:
        unfinished = len(self._groups) - self._ready_count
        return Load(len(self._groups), unfinished, self._unfinished_samples)

    def _start(self, prompt: Prompt) -> None:
        group = PromptGroup(prompt, order=self.counters.admitted_groups)
        n = self._admission.samples_per_group
        group.unfinished = n
        group.samples = [Sample(f"{prompt.uid}#{i}", group, since=self._clock()) for i in range(n)]
        self._groups[group.uid] = self._by_order[group.order] = group
        self._lengths.open()
        self._unfinished[None] += 1
        self._unfinished_samples += n
        self.counters.admitted_groups += 1
        for sample in group.samples:
            self._samples[sample.id] = sample
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
        held = [self._samples[i] for i in slots.running] + self._queue.drain(worker)
        for sample in held:
            sample.worker = None
            self._enter(sample, SampleState.INTERRUPTED if sample.segments else SampleState.WAITING)
            self._queue.push(sample)
        return len(held)

    # -- rounds ----------------------------------------------------------------------------------------------------

    def advance_version(self, version: int) -> None:
        """The engines hold the weights of ``version`` from here on."""
        if version < self.version:
            raise RuntimeError(f"policy version went from {self.version} back to {version}")
        self.version = version

    def open_round(self) -> int:
        """Admit what the mode starts a round with, and let workers claim; returns the groups admitted."""
        if self.round_open:
            raise RuntimeError("the round is open already")
        admitted = self.admit(round_start=True)
        self.round_open = True
        return admitted

    def close_round(self) -> None:
        """No more claims: running samples are about to be interrupted."""
        self.round_open = False

    def round_complete(self) -> bool:
        """Whether N groups are ready and stopping now leaves every other group trainable in time."""
        size = self._admission.batch_groups
        if self._ready_count < size:
            return self._drained()
        return self._feasible_after(size)

    def _drained(self) -> bool:
        return not self._source_open and not self._reserve and self._ready_count == len(self._groups)

    def _feasible_after(self, size: int) -> bool:
        """Earliest-deadline check: of the groups left, at most j * N may be due within j more rounds."""
        left = Counter({birth: len(groups) for birth, groups in self._ready.items()})
        to_take = size
        for birth in sorted(left):
            taken = min(to_take, left[birth])
            left[birth] -= taken
            to_take -= taken
        for birth, count in self._unfinished.items():
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
            self._unfinished[None] -= 1
            self._unfinished[group.birth] += 1
            self._queue.refresh(group)
        if sample.state is SampleState.INTERRUPTED:
            self.counters.resumed += 1
        sample.worker = worker
        self._enter(sample, SampleState.RUNNING)
        return Grant(sample.id, group.uid, group.order, group.prompt.row, tuple(sample.segments))

    def add_segment(self, sample_id: str, segment: Segment) -> None:
        """Cache tokens of a running sample, so that they survive its worker."""
        sample = self._running(sample_id, "add_segment")
        if len(segment):
            sample.segments.append(segment)

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
        group = sample.group
        self._free_slot(sample)
        self._enter(sample, SampleState.FINISHED)
        sample.output = output
        sample.segments = []
        del self._samples[sample_id]
        group.unfinished -= 1
        group.finished_length += output.response_length
        self._unfinished_samples -= 1
        if group.unfinished:
            self._queue.refresh(group)
        else:
            self._make_ready(group)

    def _make_ready(self, group: PromptGroup) -> None:
        assert group.birth is not None
        self._unfinished[group.birth] -= 1
        if not self._unfinished[group.birth]:
            del self._unfinished[group.birth]
        self._ready.setdefault(group.birth, deque()).append(group)
        self._ready_count += 1
        self._lengths.close(group.order, group.finished_length)

    def fail(self, sample_id: str) -> None:
        """RUNNING -> FAILED: the sample ended without an output."""
        sample = self._running(sample_id, "fail")
        self._free_slot(sample)
        self._enter(sample, SampleState.FAILED)
        self.counters.failed += 1

    def _running(self, sample_id: str, verb: str) -> Sample:
        sample = self._samples.get(sample_id)
        if sample is None or sample.state is not SampleState.RUNNING:
            state = "unknown or finished" if sample is None else sample.state
            raise RuntimeError(f"{verb}: sample {sample_id} is {state}, not running")
        return sample

    def _free_slot(self, sample: Sample) -> None:
        assert sample.worker is not None
        self._workers[sample.worker].running.discard(sample.id)

    def _enter(self, sample: Sample, state: SampleState) -> None:
        sample.state = state
        sample.since = self._clock()

    # -- batches ---------------------------------------------------------------------------------------------------

    def take_batch(self) -> list[TakenGroup]:
        """The N oldest ready groups, READY -> TAKEN; fewer only when the data has run out."""
        size = self._admission.batch_groups
        if self._ready_count < size and not self._drained():
            raise RuntimeError(f"take_batch: {self._ready_count} groups are ready, {size} are needed")
        batch: list[PromptGroup] = []
        for birth in sorted(self._ready):
            groups = self._ready[birth]
            while groups and len(batch) < size:
                batch.append(groups.popleft())
            if not groups:
                del self._ready[birth]
        self._ready_count -= len(batch)
        for group in batch:
            group.handed_over = GroupState.TAKEN
            del self._groups[group.uid]
            self._taken[group.uid] = group
        return [self._view(group) for group in batch]

    @staticmethod
    def _view(group: PromptGroup) -> TakenGroup:
        outputs = tuple(sample.output for sample in group.samples if sample.output is not None)
        return TakenGroup(group.uid, group.order, group.prompt.epoch, group.prompt.row, outputs)

    def acknowledge(self, uids: Iterable[str]) -> None:
        """TAKEN -> TRAINED: the trainer has updated on these groups, and they are forgotten."""
        for uid in uids:
            group = self._taken.pop(uid, None)
            if group is None:
                raise RuntimeError(f"acknowledge: group {uid} was not taken")
            group.handed_over = GroupState.TRAINED
            del self._by_order[group.order]
            self.counters.trained_groups += 1
            self._trained_tokens += group.finished_length

    # -- observation -----------------------------------------------------------------------------------------------

    @property
    def lost_groups(self) -> int:
        """Groups admitted that are neither trained, nor with the trainer, nor in flight: always 0."""
        return self.counters.admitted_groups - self.counters.trained_groups - len(self._taken) - len(self._groups)

    def length_bias(self) -> tuple[float, float]:
        """Mean response length (tokens) of the groups trained, and of as many groups in dispatch order.

        Their ratio is 1 when training sees what was dispatched. A group that has not ended counts with its length so
        far. (nan, nan) before the first ``acknowledge``.
        """
        groups = self.counters.trained_groups
        if not groups:
            return float("nan"), float("nan")

        def so_far(order: int) -> int:
            return sum(sample.length for sample in self._by_order[order].samples)

        samples = groups * self._admission.samples_per_group
        return self._trained_tokens / samples, self._lengths.total_of_first(groups, so_far) / samples

    def metrics(self) -> dict[str, float]:
        """Gauges and totals; groups and samples are counts."""
        load = self._load()
        carried = sum(count for birth, count in self._unfinished.items() if birth is not None)
        return {
            "inflight/groups": load.groups,
            "inflight/samples": load.unfinished_samples,
            "cache/carried_groups": carried + self._ready_count,
            "cache/ready_groups": self._ready_count,
            "cache/interrupted": self.counters.interrupted,
            "cache/resumed": self.counters.resumed,
            "admission/admitted": self.counters.admitted_groups,
            "failures/failed": self.counters.failed,
            "lost_samples": self.lost_groups * self._admission.samples_per_group,
        }

    def unfinished_report(self, limit: int = 8) -> str:
        """One line for an error: the unfinished samples, longest unchanged first."""
        now = self._clock()
        live = [s for s in self._samples.values() if s.state is not SampleState.FINISHED]
        live.sort(key=lambda sample: sample.since)
        rows = [
            f"{s.id} {s.state} on {s.worker or 'no worker'} for {now - s.since:.0f} s ({s.cached_tokens} tokens cached)"
            for s in live[:limit]
        ]
        more = f" and {len(live) - limit} more" if len(live) > limit else ""
        return f"{len(live)} unfinished samples: " + "; ".join(rows) + more
