"""Capacity of the workers, and the samples that they can claim.

Workers share samples in proportion to their slots: a worker claims samples that any worker could run only until it has
its fair share. While such a sample is left, some worker is below its share and has a free slot, or all slots are taken.
So once every worker has claimed, no slot stays free that could be filled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from recipe.partial_rollout.config.choices import SchedulingPolicy
from recipe.partial_rollout.manager.scheduling import ClaimQueue
from recipe.partial_rollout.manager.types import PromptGroup, Sample


@dataclass(slots=True)
class WorkerSlots:
    """Capacity of one worker, kept apart from the lifecycle of its samples."""

    capacity: int
    running: dict[str, Sample] = field(default_factory=dict)
    """by id"""
    away: dict[str, Sample] = field(default_factory=dict)
    """by id; they hold no slot"""
    returned: deque[Sample] = field(default_factory=deque)
    """were away and wait for a slot, before all other samples"""

    @property
    def free(self) -> int:
        return self.capacity - len(self.running)


class Slots:
    """The slots of all workers, and the queue of samples that wait for one.

    >>> from recipe.partial_rollout.manager.types import Prompt
    >>> group = PromptGroup(Prompt("0/0", 0, {}), order=0, unfinished=4)
    >>> group.samples = [Sample(f"0/0#{i}", group) for i in range(4)]
    >>> slots = Slots(SchedulingPolicy.BOUNDED)
    >>> slots.register("fast", 6)
    >>> slots.register("slow", 2)
    >>> for sample in group.samples:
    ...     slots.offer(sample)
    >>> [sample.id for sample in slots.claim("fast", None, unfinished=4, overdue=-1)]
    ['0/0#0', '0/0#1', '0/0#2']
    >>> [sample.id for sample in slots.claim("slow", None, unfinished=4, overdue=-1)]
    ['0/0#3']
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._queue = ClaimQueue(policy)
        self._workers: dict[str, WorkerSlots] = {}
        self._capacity = 0
        self._away = 0

    # -- workers ---------------------------------------------------------------------------------------------------

    def register(self, worker: str, capacity: int) -> None:
        """Add a worker that can run ``capacity`` samples at once."""
        _check(worker, capacity)
        if worker in self._workers:
            raise RuntimeError(f"worker {worker} is registered already")
        self._workers[worker] = WorkerSlots(capacity)
        self._capacity += capacity

    def resize(self, worker: str, capacity: int) -> None:
        """From here on ``worker`` can run ``capacity`` samples at once; running samples are not stopped."""
        _check(worker, capacity)
        slots = self.incarnation(worker)
        self._capacity += capacity - slots.capacity
        slots.capacity = capacity

    def release(self, worker: str) -> list[Sample]:
        """Forget a dead worker; returns the samples that it had: nobody owns them now."""
        slots = self._workers.pop(worker, None)
        if slots is None:
            return []
        self._capacity -= slots.capacity
        self._away -= len(slots.away)
        return [*slots.running.values(), *slots.away.values(), *slots.returned, *self._queue.drain(worker)]

    @property
    def workers(self) -> Iterable[str]:
        """Workers that have joined and were not released."""
        return self._workers

    @property
    def running(self) -> int:
        """Samples that hold a slot."""
        return sum(len(slots.running) for slots in self._workers.values())

    def incarnation(self, worker: str) -> WorkerSlots:
        """The slots of ``worker``: the same object until it is released.

        Raises:
            RuntimeError: it is not registered, or was released.
        """
        slots = self._workers.get(worker)
        if slots is None:
            raise RuntimeError(f"worker {worker} is not registered: it was released, or never joined")
        return slots

    # -- samples ---------------------------------------------------------------------------------------------------

    def offer(self, sample: Sample) -> None:
        """Make ``sample`` claimable by its worker, or by any worker if it has none."""
        self._queue.push(sample)

    def refresh(self, group: PromptGroup) -> None:
        """Re-sort ``group``, whose priority has changed."""
        self._queue.refresh(group)

    def free(self, sample: Sample) -> None:
        """Free the slot of ``sample``, if it still has it; its worker no longer has it."""
        assert sample.worker is not None
        slots = self._workers[sample.worker]
        if sample.id in slots.running:
            del slots.running[sample.id]
        else:
            del slots.away[sample.id]
            self._away -= 1

    def leave(self, sample: Sample) -> None:
        """Free the slot of ``sample``, which lives on in its worker."""
        assert sample.worker is not None
        slots = self._workers[sample.worker]
        slots.away[sample.id] = slots.running.pop(sample.id)
        self._away += 1

    def come_back(self, sample: Sample) -> None:
        """Make ``sample``, which was away, the next but for others that came back before it."""
        assert sample.worker is not None
        slots = self._workers[sample.worker]
        slots.returned.append(slots.away.pop(sample.id))
        self._away -= 1

    def claim(
        self, worker: str, limit: int | None, unfinished: int, overdue: float, *, beyond_share: bool = False
    ) -> Iterator[Sample]:
        """Up to ``limit`` samples, each with a slot of ``worker``: those that came back, then the others by priority.

        Of the samples that any worker could run it gets overdue ones, and others up to its share. Each sample is chosen
        when the iterator reaches it, because starting the one before may have changed the priority of its group.

        Args:
            limit: None stands for all its free slots.
            unfinished: number of unfinished samples over all workers; those that are away need no slot.
            overdue: groups born at this version, or before, are overdue.
            beyond_share: also take part of the samples that other workers have left unclaimed.
        """
        slots = self.incarnation(worker)
        shared = math.ceil((unfinished - self._away) * slots.capacity / self._capacity)
        shared -= len(slots.running) + len(slots.returned) + self._queue.size(worker)
        if beyond_share:
            shared = max(shared, math.ceil(self._queue.size(None) / len(self._workers)))
        for _ in range(slots.free if limit is None else min(limit, slots.free)):
            if slots.returned:
                sample = slots.returned.popleft()
            elif (sample := self._queue.pop(worker, overdue, own_only=shared <= 0)) is None:
                return
            shared -= sample.worker != worker
            slots.running[sample.id] = sample
            yield sample

    def held_back(self, worker: str) -> bool:
        """Whether ``worker`` has free slots but got no more samples because it already has its share."""
        return self._workers[worker].free > 0 and self._queue.size(None) > 0


def _check(worker: str, capacity: int) -> None:
    if capacity < 1:
        raise ValueError(f"capacity of {worker} is {capacity}; it must be at least 1")
