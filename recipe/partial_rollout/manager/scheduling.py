"""Which sample runs next, and where: the claim queue, and the slots of the workers.

A policy is a sort key of a group (smaller first), made of its birth, its age and its distance from completion. Overdue
groups, those at ``max_staleness``, come first whatever their key: they must finish in this round. Next come, by their key,
samples whose conversation the worker holds, then all others.

``ClaimQueue`` keeps the groups that have a claimable sample in heaps, one for each (owner, birth), cleaned lazily. A
claim looks at the top of each heap. Bounded staleness bounds the number of heaps, so a claim costs O(log n).

Workers share samples in proportion to their slots: a worker claims samples that any worker could run only until it has
its fair share. While such a sample is left, some worker is below its share and has a free slot, or all slots are taken.
So once every worker has claimed, no slot stays free that could be filled.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from recipe.partial_rollout.config.choices import SchedulingPolicy
from recipe.partial_rollout.manager.types import PromptGroup, Sample

Key = tuple[float, ...]


def _birth(group: PromptGroup) -> float:
    return float("inf") if group.birth is None else group.birth


def _bounded(group: PromptGroup) -> Key:
    return (_birth(group), group.unfinished, group.mean_finished_length)


def _seed(group: PromptGroup) -> Key:
    # Ascending staleness is descending birth, so the order does not change as the version advances.
    return (group.unfinished, group.mean_finished_length, -_birth(group))


def _in_order(group: PromptGroup) -> Key:
    return ()


_KEYS: dict[SchedulingPolicy, Callable[[PromptGroup], Key]] = {
    SchedulingPolicy.BOUNDED: _bounded,
    SchedulingPolicy.SEED: _seed,
    SchedulingPolicy.IN_ORDER: _in_order,
}


def get_scheduling_priority(group: PromptGroup, policy: SchedulingPolicy = SchedulingPolicy.BOUNDED) -> Key:
    """Sort key of ``group``: of two groups with a claimable sample, the one with the smaller key runs first.

    The key uses the number of unfinished samples, the mean length of the finished ones (tokens; 1e9 if none has
    finished) and the birth version, which stands for staleness; ties go to dispatch order.
    """
    return (*_KEYS[policy](group), group.order)


@dataclass(slots=True)
class _Claimable:
    """The samples of one group that one owner can claim."""

    samples: deque[Sample] = field(default_factory=deque)
    stamp: int = 0
    """stamp of the group's valid heap entry; entries with other stamps are stale"""


_Entry = tuple[Key, int, PromptGroup]


class ClaimQueue:
    """Samples that can be claimed by any worker (owner None), or only by the worker that holds their conversation.

    Three groups with policy ``bounded``; "w0" holds the conversation of the interrupted sample of 0/0::

        owner "w0"   birth 3: 0/0   (3, 1, 1e9, 0)      oldest first
        owner None   birth 4: 0/1   (4, 1, 1e9, 1)
                     not born: 0/2  (inf, 1, 1e9, 2)

    >>> from recipe.partial_rollout.manager.types import Prompt
    >>> queue = ClaimQueue(SchedulingPolicy.BOUNDED)
    >>> for order, (birth, owner) in enumerate([(3, "w0"), (4, None), (None, None)]):
    ...     group = PromptGroup(Prompt(f"0/{order}", 0, {}), order, birth=birth, unfinished=1)
    ...     queue.push(Sample(f"0/{order}#0", group, worker=owner))
    >>> [queue.pop("w1", overdue_birth=0).id, queue.pop("w0", overdue_birth=0).id]
    ['0/1#0', '0/0#0']
    >>> queue.pop("w1", overdue_birth=0, own_only=True) is None, queue.size(None)
    (True, 1)
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._buckets: dict[str | None, dict[int | None, list[_Entry]]] = {}
        self._claimable: dict[str | None, dict[str, _Claimable]] = {}
        self._owners: dict[str, set[str | None]] = {}
        self._stamp = 0
        self._sizes: Counter[str | None] = Counter()

    def size(self, owner: str | None) -> int:
        """Number of samples that only ``owner`` can claim; with None, of those that any worker can claim."""
        return self._sizes[owner]

    def push(self, sample: Sample) -> None:
        """Offer ``sample`` to its worker, or to all when it has none."""
        owner, group = sample.worker, sample.group
        self._claimable.setdefault(owner, {}).setdefault(group.uid, _Claimable()).samples.append(sample)
        self._owners.setdefault(group.uid, set()).add(owner)
        self._sizes[owner] += 1
        self._enter(owner, group)

    def refresh(self, group: PromptGroup) -> None:
        """Re-file ``group`` after its key has changed."""
        for owner in self._owners.get(group.uid, ()):
            self._enter(owner, group)

    def pop(self, worker: str, overdue_birth: float, *, own_only: bool = False) -> Sample | None:
        """The next sample for ``worker``; groups born at or before ``overdue_birth`` come first, then what it holds.

        ``own_only``: leave samples that any worker could claim to others, unless they are overdue.
        """
        best: tuple[Key, str | None, int | None] | None = None
        for owner in (worker, None):
            buckets = self._buckets.get(owner, {})
            for birth in list(buckets):
                top = self._top(owner, birth)
                if top is None:
                    del buckets[birth]
                    continue
                overdue = birth is not None and birth <= overdue_birth
                if own_only and owner is None and not overdue:
                    continue
                # What a worker holds may hold places of the user's own, such as sandboxes, that new samples wait for.
                key = (0.0, float(birth), *top[0]) if birth is not None and overdue else (1.0, owner is None, *top[0])
                if best is None or key < best[0]:
                    best = (key, owner, birth)
        if best is None:
            return None
        _, owner, birth = best
        _, _, group = self._buckets[owner][birth][0]
        return self._take(owner, group)

    def drain(self, owner: str) -> list[Sample]:
        """Withdraw every sample that only ``owner`` could claim."""
        held = self._claimable.pop(owner, {})
        samples = [sample for claimable in held.values() for sample in claimable.samples]
        for uid in held:
            self._forget(owner, uid)
        self._buckets.pop(owner, None)
        del self._sizes[owner]
        return samples

    def _enter(self, owner: str | None, group: PromptGroup) -> None:
        self._stamp += 1
        self._claimable[owner][group.uid].stamp = self._stamp
        bucket = self._buckets.setdefault(owner, {}).setdefault(group.birth, [])
        heapq.heappush(bucket, (get_scheduling_priority(group, self._policy), self._stamp, group))

    def _top(self, owner: str | None, birth: int | None) -> _Entry | None:
        bucket = self._buckets[owner][birth]
        while bucket:
            _, stamp, group = bucket[0]
            claimable = self._claimable.get(owner, {}).get(group.uid)
            if claimable is not None and claimable.stamp == stamp:
                return bucket[0]
            heapq.heappop(bucket)
        return None

    def _take(self, owner: str | None, group: PromptGroup) -> Sample:
        claimable = self._claimable[owner][group.uid]
        sample = claimable.samples.popleft()
        self._sizes[owner] -= 1
        if not claimable.samples:
            del self._claimable[owner][group.uid]
            self._forget(owner, group.uid)
        return sample

    def _forget(self, owner: str | None, uid: str) -> None:
        owners = self._owners[uid]
        owners.discard(owner)
        if not owners:
            del self._owners[uid]


@dataclass(slots=True)
class WorkerLoad:
    """Capacity of one worker, kept apart from the lifecycle of its samples."""

    capacity: int
    running: dict[str, Sample] = field(default_factory=dict)
    """by id"""
    away: dict[str, Sample] = field(default_factory=dict)
    """by id; they hold no slot"""

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
        self._workers: dict[str, WorkerLoad] = {}
        self._capacity = 0
        self.away = 0
        """samples that live on without a slot"""

    # -- workers ---------------------------------------------------------------------------------------------------

    def register(self, worker: str, capacity: int) -> None:
        """Add a worker that can run ``capacity`` samples at once."""
        _check(worker, capacity)
        if worker in self._workers:
            raise RuntimeError(f"worker {worker} is registered already")
        self._workers[worker] = WorkerLoad(capacity)
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
        self.away -= len(slots.away)
        return [*slots.running.values(), *slots.away.values(), *self._queue.drain(worker)]

    @property
    def workers(self) -> Iterable[str]:
        """Workers that have joined and were not released."""
        return self._workers

    @property
    def running(self) -> int:
        """Samples that hold a slot."""
        return sum(len(slots.running) for slots in self._workers.values())

    def incarnation(self, worker: str) -> WorkerLoad:
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
            self.away -= 1

    def leave(self, sample: Sample) -> None:
        """Free the slot of ``sample``, which lives on in its worker."""
        assert sample.worker is not None
        slots = self._workers[sample.worker]
        slots.away[sample.id] = slots.running.pop(sample.id)
        self.away += 1

    def come_back(self, sample: Sample) -> None:
        """Make ``sample``, which was away, claimable by its worker again."""
        self.free(sample)
        self.offer(sample)

    def claim(
        self, worker: str, limit: int | None, unfinished: int, overdue: float, *, beyond_share: bool = False
    ) -> Iterator[Sample]:
        """Up to ``limit`` samples by priority, each with a slot of ``worker``.

        Of the samples that any worker could run it gets overdue ones, and others up to its share. Each sample is chosen
        when the iterator reaches it, because starting the one before may have changed the priority of its group.

        Args:
            limit: None stands for all its free slots.
            unfinished: number of unfinished samples over all workers; those that are away need no slot.
            overdue: groups born at this version, or before, are overdue.
            beyond_share: also take part of the samples that other workers have left unclaimed.
        """
        slots = self.incarnation(worker)
        shared = math.ceil((unfinished - self.away) * slots.capacity / self._capacity)
        shared -= len(slots.running) + self._queue.size(worker)
        if beyond_share:
            shared = max(shared, math.ceil(self._queue.size(None) / len(self._workers)))
        for _ in range(slots.free if limit is None else min(limit, slots.free)):
            if (sample := self._queue.pop(worker, overdue, own_only=shared <= 0)) is None:
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
