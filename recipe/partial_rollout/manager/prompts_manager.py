"""The state of partial rollout: which prompts are in flight, and the state of each of their samples.

A pure state machine, driven by verbs: no Ray, no asyncio, no torch, no clock of its own. It guarantees, across
checkpoints, that

* every prompt offered is consumed exactly once: its group is acknowledged as trained, or FILTERED when its last sample
  ends;
* no group is trained later than ``max_staleness`` versions after its first sample started (proof: ``admission``);
* a sample is in one place: it is claimable, or one worker has it (RUNNING, PARKED), or it awaits a retry, or it ended.

``groups`` has the states of samples and groups. The states of a version (``VersionState``) are below. In colocated
placement each batch stops the round; in separate placement the samples run on::

    CLOSED --begin_version--> OPEN --take_batch(stop=True)---> CLOSED
                               ^  --take_batch(stop=False)--> AHEAD
                               +--------begin_version----------+

Both placements take N groups a version and admit prompts when it begins, so the bound on staleness is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.admission import Admission, rest_can_be_trained
from recipe.partial_rollout.manager.groups import Backlog, Groups, Samples
from recipe.partial_rollout.manager.policies import FailureVerdict, common_value, masked_output, verdict_on
from recipe.partial_rollout.manager.scheduling import ClaimQueue, Slots, order_of
from recipe.partial_rollout.manager.types import (
    GroupState,
    Lease,
    PromptGroup,
    Sample,
    SampleOutput,
    SampleState,
    Segment,
    TakenGroup,
)

_LIVE = (SampleState.RUNNING, SampleState.PARKED, SampleState.INTERRUPTED)


class VersionState(StrEnum):
    CLOSED = "closed"
    """No sample may be claimed."""
    OPEN = "open"
    """Samples run; the batch of this version is to come."""
    AHEAD = "ahead"
    """Samples run on while the trainer has the batch of this version."""


class PromptsManager:
    """Owner of all prompts between the data source and the trainer.

    A batch of one group of two samples, one spare group in flight, three slots. After the first batch::

        backlog        in flight                                trainer
        0/2     ---->  0/1#0 interrupted, 0/1#1 waiting  ---->  0/0

    >>> import numpy as np
    >>> from recipe.partial_rollout.config.settings import PartialRolloutConfig
    >>> from recipe.partial_rollout.manager.types import Prompt, SampleOutput
    >>> settings = PartialRolloutConfig(batch_groups=1, samples_per_group=2)
    >>> manager = PromptsManager(settings, clock=lambda: 0.0)
    >>> manager.backlog.enqueue(Prompt(f"0/{i}", {}) for i in range(3))
    >>> manager.slots.register("w0", capacity=3)
    >>> manager.begin_version(0)
    >>> [lease.sample_id for lease in manager.claim("w0")]
    ['0/0#0', '0/0#1', '0/1#0']
    >>> token = np.ones(1, np.int32)
    >>> output = SampleOutput(token, token, token, -token, 0 * token, 1, 1.0, {}, 2, {})
    >>> for sample_id in ("0/0#0", "0/0#1"):
    ...     manager.finish(sample_id, output)
    >>> [group.uid for group in manager.take_batch(stop=True)]
    ['0/0']
    >>> manager.interrupt("0/1#0")

    Args:
        settings: the run's settings.
        clock: returns seconds; stamped on state changes for stall reports.
        train_groups: number of groups that the whole training trains; None: no limit (``Admission``).
        put: stores the outputs of a READY group, and returns the store's reference to them.
    """

    def __init__(
        self,
        settings: PartialRolloutConfig,
        clock: Callable[[], float],
        train_groups: int | None = None,
        put: Callable[[Sequence[SampleOutput]], Any] = tuple,
    ) -> None:
        self._settings = settings
        self._admission = Admission(settings, train_groups)
        self._filter = settings.group_filter
        self.version = 0
        """policy version that decodes the claimed samples"""
        self.groups = Groups(put)
        self.counters = self.groups.counters
        self.backlog = Backlog()
        self.samples = Samples(self.counters, clock)
        self.slots = Slots(ClaimQueue(order_of(settings.scheduling, settings.batch_groups)), self.samples)
        self._version_state = VersionState.CLOSED
        self.batch_taken = False
        """whether the batch of the present version was taken"""
        self._filtered = 0
        """groups filtered since the version began"""
        self._to_replace = 0
        """groups of ``_filtered`` that no new prompt has replaced yet"""

    # -- samples ---------------------------------------------------------------------------------------------------

    def claim(self, worker: str, limit: int | None = None) -> list[Lease]:
        """Lease up to ``limit`` samples to ``worker``, by priority (``Slots.claim``).

        None stands for all its free slots. The list is empty while the round is closed.
        """
        self.slots.require(worker)
        if not self.round_open:
            return []
        # A group that would be too old after the next batch must be in it.
        next_to_train = self.version + (self._version_state is VersionState.AHEAD)
        self.slots.queue.make_overdue(next_to_train - self._settings.max_staleness)
        return [self._lease(sample, worker) for sample in self.slots.claim(worker, limit)]

    def _lease(self, sample: Sample, worker: str) -> Lease:
        group = sample.group
        if group.state is GroupState.WAITING:
            self.groups.start(group, self.version)
            # Its key may read its birth, which it has only now.
            self.slots.queue.refresh(group)
        # A worker that still holds the conversation has its tokens; they need not be sent at every resumption.
        resident = sample.worker == worker
        segments = () if resident else tuple(sample.segments)
        sample.worker = worker
        self.samples.move(sample.id, "claim")
        slots = self.slots.workers[worker]
        return Lease(sample.id, group.uid, group.order, group.prompt.row, segments, resident=resident, slots=slots)

    def add(self, sample_id: str, segments: Sequence[Segment]) -> None:
        """Cache segments of a sample, so that a single-turn sample can continue from them if its worker dies."""
        # Of several calls at once, one may be interrupted while others still report, so any live state will do.
        sample = self.samples.in_state(sample_id, "add", _LIVE)
        sample.segments += [segment for segment in segments if len(segment)]

    def park(self, sample_id: str) -> None:
        """Free the slot of a sample that makes no engine call. Its agent loop continues in its worker."""
        self.samples.move(sample_id, "park")

    def interrupt(self, sample_id: str) -> None:
        """Free the slot of a sample, if it holds one, and queue the sample before new prompts.

        Its worker keeps its conversation, so no other worker can claim it while that worker lives.
        """
        self.slots.queue.push(self.samples.move(sample_id, "interrupt"))

    def finish(self, sample_id: str, output: SampleOutput) -> None:
        """Free the slot of a sample, if it holds one; ``output`` replaces its segments.

        With its last sample the group becomes READY, or FILTERED.
        """
        self._end(self.samples.move(sample_id, "finish"), output)

    def fail(self, sample_id: str, error: str, times: int = 1) -> FailureVerdict:
        """Free the slot of a sample that failed, if it holds one, and return the verdict.

        RETRY: call ``retry`` after ``retry_delay_s``. MASK: the sample is FINISHED, masked. RAISE: the run must end.

        Args:
            error: the error of its agent loop or reward, in one line.
            times: failures that count against ``sample_retries``; above 1 if its reward failed several times in a row.
        """
        sample = self.samples.move(sample_id, "fail")
        # The conversation has ended with its coroutine, so any worker may run the retry.
        sample.worker, sample.error = None, error
        sample.failures += times
        verdict = verdict_on(sample.failures, self._settings.failures)
        self.counters.failed += 1
        if verdict is FailureVerdict.MASK:
            self.counters.masked += 1
            self._end(self.samples.move(sample_id, "mask"), masked_output(sample.segments, error))
        return verdict

    def retry(self, sample_id: str) -> None:
        """Make a failed sample claimable. A single-turn one continues from its tokens, a multi-turn one begins anew."""
        self._requeue(sample_id, "retry")

    def release_worker(self, worker: str) -> int:
        """Forget a dead worker and requeue its samples, as ``retry`` does; return how many they were."""
        held = self.slots.release(worker)
        for sample in held:
            self._requeue(sample.id, "release_worker")
        return len(held)

    def _requeue(self, sample_id: str, verb: str) -> None:
        """Apply ``verb`` to a sample, take it from its worker if it has one, and let any worker claim it."""
        sample = self.samples.move(sample_id, verb)
        sample.worker = None
        self.slots.queue.push(sample)

    def _end(self, sample: Sample, output: SampleOutput) -> None:
        group = sample.group
        sample.output = output
        sample.segments = []
        del self.samples.unfinished[sample.id]
        self.groups.end_sample(group, output.response_length)
        # Its key may read how many samples are left, and their lengths.
        self.slots.queue.refresh(group)
        if not group.unfinished:
            self._end_group(group)

    def _end_group(self, group: PromptGroup) -> None:
        value = common_value(self._filter.metric, group.outputs) if self._filter is not None else None
        if value is not None and self._may_filter():
            self.groups.filter(group, value)
            self._filtered += 1
            # A closed round admits no replacement: the next version fills the window in any case.
            self._to_replace += self.round_open
        else:
            self.counters.kept_groups += value is not None
            self.groups.ready(group)

    def _may_filter(self) -> bool:
        """Whether one more group may be filtered in this version.

        The limit ``max_num_gen_batches`` must not be reached, and the remaining prompts must fill a batch without it.
        """
        assert self._filter is not None
        size, most = self._settings.batch_groups, self._filter.max_num_gen_batches
        if most and self._filtered >= (most - 1) * size:
            return False
        return self.groups.in_flight - 1 + len(self.backlog.prompts) + self.backlog.source_left >= size

    # -- admission -------------------------------------------------------------------------------------------------

    def admit(self, *, version_begins: bool = False) -> None:
        """Admit prompts from the backlog as far as the mode allows.

        Args:
            version_begins: whether the version begins now. Only then modes ``window`` and ``april`` fill the window.
        """
        groups = self.groups
        while self.backlog.prompts and self._admission.allows(
            groups,
            len(self.samples.unfinished),
            self.version,
            version_begins=version_begins,
            to_replace=self._to_replace,
        ):
            prompt = self.backlog.prompts.popleft()
            self.enter(groups.enter(prompt, self._settings.samples_per_group))
            self._to_replace = max(0, self._to_replace - 1)

    def enter(self, group: PromptGroup) -> None:
        """Add the unfinished samples of ``group``, new or restored; any worker may claim them."""
        for sample in group.samples:
            if sample.state is not SampleState.FINISHED:
                self.samples.unfinished[sample.id] = sample
                self._requeue(sample.id, "admit")

    @property
    def wanted(self) -> int:
        """Number of prompts that the driver should enqueue now, so that the next version does not run short.

        With dynamic sampling it includes N spare prompts, which replace filtered groups. 0 if the source has none left.
        """
        # The driver is asked for more when fewer than N prompts are left: N groups may be filtered until it answers.
        spare = self._settings.batch_groups if self._filter is not None else 0
        missing = self._admission.most_per_version() + spare - len(self.backlog.prompts)
        return max(0, missing) if self.backlog.source_left else 0

    @property
    def short_of_prompts(self) -> bool:
        """Whether the driver must enqueue prompts before the batch is complete.

        Dynamic sampling may soon filter more groups than the backlog can replace, and the data has prompts left.
        """
        filters = self._filter is not None and self.backlog.source_left > 0
        return self.round_open and filters and len(self.backlog.prompts) < self._settings.batch_groups

    @property
    def exhausted(self) -> bool:
        """Whether the data has ended with fewer prompts left than a batch needs, so that no further batch can complete.

        This only happens with dynamic sampling, which consumes more prompts than it trains.
        """
        ended = self._filter is not None and not self.backlog.source_left
        return ended and self.groups.in_flight + len(self.backlog.prompts) < self._settings.batch_groups

    # -- versions and batches --------------------------------------------------------------------------------------

    @property
    def round_open(self) -> bool:
        """Whether workers may claim."""
        return self._version_state is not VersionState.CLOSED

    def begin_version(self, version: int) -> None:
        """CLOSED, AHEAD -> OPEN: admit the groups of ``version`` and let workers claim.

        From CLOSED it may begin while the trainer still has the batch of the version before. After ``suspend`` the
        present version may begin again.

        Raises:
            RuntimeError: the batch of the present version is not taken (OPEN), or is taken and not trained (AHEAD). Or
                ``version`` is below the present one. Or a batch was taken and ``version`` is not the next one.
        """
        present, ahead = self.version, self._version_state is VersionState.AHEAD
        if self._version_state is VersionState.OPEN or (ahead and self.groups.taken):
            state = "trained" if ahead else "taken"
            raise RuntimeError(f"begin_version: the batch of version {present} is not {state}: {version} cannot follow")
        if version < present or (self.batch_taken and version != present + 1):
            raise RuntimeError(
                f"begin_version: {version} cannot follow {present}: each batch raises the version by one"
            )
        # Before prompts are admitted: the batch with the trainer counts until its version has passed (``pacing_load``).
        self.version = version
        self.batch_taken = False
        self._filtered = self._to_replace = 0
        self.admit(version_begins=True)
        self._version_state = VersionState.OPEN

    def suspend(self) -> None:
        """OPEN, AHEAD -> CLOSED without a batch."""
        self._version_state = VersionState.CLOSED

    def require_open(self, verb: str) -> None:
        """Raise RuntimeError, which names the state, unless the batch of this version is to come."""
        if self._version_state is not VersionState.OPEN:
            raise RuntimeError(f"{verb}: the version is {self._version_state}, not open: call begin_version first")

    def round_complete(self) -> bool:
        """Whether the batch of this version can be taken.

        It needs N ready groups, of which the N oldest leave only groups that can be trained in time, and overtake no
        unfinished group by too much (``scheduling.overtake``). At the end of the data the groups that are left suffice.
        A round always ends: the last two conditions hold at the latest when no group in flight is unfinished.
        """
        if self._version_state is not VersionState.OPEN:
            return False
        groups, size = self.groups, self._settings.batch_groups
        if len(groups.ready_queue) < size:
            # At the end of the data fewer than N may be left. To wait for more would never end.
            return not (self.backlog.source_left or self.backlog.prompts or groups.waiting_or_active)
        batch = [group.birth for group in groups.ready_queue[:size]]
        return (
            rest_can_be_trained(groups.births, batch, self.version, self._settings.max_staleness)
            and self._within_reorder_window()
        )

    def _within_reorder_window(self) -> bool:
        """Whether the batch overtakes no unfinished group by more positions of the data than ``overtake`` allows."""
        size = self._settings.batch_groups
        positions = self._settings.scheduling.positions(size)
        unfinished = self.groups.in_state(GroupState.WAITING, GroupState.ACTIVE)
        if positions is None or (oldest := next(unfinished, None)) is None:
            return True
        return self.groups.ready_queue[size - 1].order <= oldest.order + positions

    def take_batch(self, *, stop: bool) -> list[TakenGroup]:
        """Take and return the N oldest ready groups, READY -> TAKEN; fewer only at the end of the data.

        With ``stop`` the version becomes CLOSED: the driver is about to interrupt the running samples. Without it the
        version becomes AHEAD: they run on.

        Raises:
            RuntimeError: the version is not OPEN, its batch is not complete, or the batch before it is not trained.
        """
        self.require_open("take_batch")
        groups, size = self.groups, self._settings.batch_groups
        if groups.taken:
            raise RuntimeError(
                f"take_batch: the previous batch is not trained yet; the batch of version {self.version} must wait"
            )
        if not self.round_complete():
            raise RuntimeError(
                f"take_batch: the round is not complete: {len(groups.ready_queue)} groups are ready; it needs {size}, "
                "and the groups left must be trainable in time"
            )
        self._version_state = VersionState.CLOSED if stop else VersionState.AHEAD
        self.batch_taken = True
        return groups.take(size)

    # -- observation -----------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Return those of ``metrics`` that change when the next version begins, so they must be read before."""
        return {
            "inflight/groups": self.groups.in_flight,
            "inflight/samples": len(self.samples.unfinished),
            "buffer/carried_groups": self.groups.carried,
            "buffer/ready_groups": len(self.groups.ready_queue),
        }

    def metrics(self) -> dict[str, float]:
        """Return gauges and totals by name, without the prefix ``partial_rollout/``; groups and samples are counted.

        A metric that has no value yet is left out: SwanLab drops a chart whose first value is nan.
        """
        groups, counters = self.groups, self.counters
        found = {
            **self.gauges(),
            "agent/slots_freed_s_total": counters.parked_s,
            "buffer/interrupted_total": counters.interrupted,
            "failures/failed_total": counters.failed,
            "failures/retried_total": counters.failed - counters.masked,
            "failures/masked_total": counters.masked,
            "failures/lost_tokens_total": counters.lost_tokens,
            "lost_samples": groups.lost * self._settings.samples_per_group,
            **groups.length_bias(),
        }
        if self._filter is not None:
            found["filter/groups_total"] = counters.filtered_groups
            found["filter/spared_total"] = counters.kept_groups
        return found
