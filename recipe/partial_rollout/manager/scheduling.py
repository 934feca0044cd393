"""Which sample runs next, and where: the claim queue, and the slots of the workers.

A policy is a sort key of a group (smaller first), made of its birth, its age and its distance from completion. Overdue
groups, those at ``max_staleness``, come first whatever their key: they must finish in this round. Next come, by their key,
samples whose conversation the worker holds, then all others.

``ClaimQueue`` has a heap of groups for each owner. An entry is a group's key; it is stale, and skipped, once the group has
another key or no sample left there. So a claim costs O(log n). Once a version, when more groups become overdue, the heaps
are made anew.

Workers share samples in proportion to their slots: a worker claims samples that any worker could run only until it has
its fair share. While such a sample is left, some worker is below its share and has a free slot, or all slots are taken.
So once every worker has claimed, no slot stays free that could be filled.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter

from recipe.partial_rollout.config.settings import Scheduling, SchedulingPolicy
from recipe.partial_rollout.manager.groups import Samples
from recipe.partial_rollout.manager.types import PromptGroup, Sample

Key = tuple[float, ...]


def get_scheduling_priority(group: PromptGroup, policy: SchedulingPolicy = SchedulingPolicy.BOUNDED) -> Key:
    """Sort key of ``group``: of two groups with a claimable sample, the one with the smaller key runs first.

    The key uses the number of unfinished samples, the mean length of the finished ones (tokens; 1e9 if none has
    finished) and the birth version, which stands for staleness; ties go to dispatch order.
    """
    birth = math.inf if group.birth is None else group.birth
    if policy is SchedulingPolicy.SEED:
        # Ascending staleness is descending birth, so the order does not change as the version advances.
        return (group.unfinished, group.mean_finished_length, -birth, group.order)
    return (birth, group.unfinished, group.mean_finished_length, group.order)


def priority_of(scheduling: Scheduling, batch_groups: int) -> Callable[[PromptGroup], Key]:
    """The key that ``scheduling`` asks for: the policy's, or dispatch order where prompts must be trained in it."""
    if scheduling.positions(batch_groups) == 0:
        return lambda group: (group.order,)
    return partial(get_scheduling_priority, policy=scheduling.policy)


class ClaimQueue:
    """Samples that can be claimed by any worker (owner None), or only by the worker that holds their conversation.

    Three groups with policy ``bounded``; "w0" holds the conversation of the interrupted sample of 0/0::

        owner "w0"   birth 3: 0/0   (1, 0, 3, 1, 1e9, 0)
        owner None   birth 4: 0/1   (1, 1, 4, 1, 1e9, 1)      oldest first
                     not born: 0/2  (1, 1, inf, 1, 1e9, 2)

    >>> from recipe.partial_rollout.manager.types import Prompt
    >>> queue = ClaimQueue(get_scheduling_priority)
    >>> for order, (birth, owner) in enumerate([(3, "w0"), (4, None), (None, None)]):
    ...     group = PromptGroup(Prompt(f"0/{order}", {}), order, birth=birth, unfinished=1)
    ...     queue.push(Sample(f"0/{order}#0", group, worker=owner))
    >>> [queue.pop("w1").id, queue.pop("w0").id]
    ['0/1#0', '0/0#0']
    >>> queue.pop("w1", own_only=True) is None, queue.sizes[None]
    (True, 1)

    Args:
        priority: a group's key; its last element is the group's ``order``.
    """

    def __init__(self, priority: Callable[[PromptGroup], Key]) -> None:
        self._priority = priority
        self._overdue = -math.inf
        """groups born at this version, or before, come first"""
        self._claimable: defaultdict[str | None, dict[float, deque[Sample]]] = defaultdict(dict)
        """by owner, and by their group's ``order``"""
        self._heaps: defaultdict[str | None, list[Key]] = defaultdict(list)
        """by owner: keys of its groups, and stale ones"""
        self.sizes: Counter[str | None] = Counter()
        """by owner: number of samples; under None, of those that any worker can claim"""

    def push(self, sample: Sample) -> None:
        """Offer ``sample`` to its worker, or to all when it has none."""
        owner, group = sample.worker, sample.group
        self._claimable[owner].setdefault(group.order, deque()).append(sample)
        self.sizes[owner] += 1
        heapq.heappush(self._heaps[owner], self._key(owner, group))

    def refresh(self, group: PromptGroup) -> None:
        """Re-file ``group`` after its key has changed."""
        for owner in {sample.worker for sample in group.samples}:
            if group.order in self._claimable.get(owner, ()):
                heapq.heappush(self._heaps[owner], self._key(owner, group))

    def make_overdue(self, birth: float) -> None:
        """From here on groups born at version ``birth``, or before, come first."""
        if birth == self._overdue:
            return
        self._overdue = birth
        for owner, held in self._claimable.items():
            self._heaps[owner] = [self._key(owner, samples[0].group) for samples in held.values()]
            heapq.heapify(self._heaps[owner])

    def pop(self, worker: str, *, own_only: bool = False) -> Sample | None:
        """The next sample for ``worker``: of overdue groups, then of those that it holds, then of all others.

        ``own_only``: leave samples that any worker could claim to others, unless they are overdue.
        """
        tops = [(top, owner) for owner in (worker, None) if (top := self._top(owner)) is not None]
        if own_only:
            tops = [(top, owner) for top, owner in tops if owner is not None or not top[0]]
        if not tops:
            return None
        (*_, order), owner = min(tops, key=itemgetter(0))
        samples = self._claimable[owner][order]
        sample = samples.popleft()
        self.sizes[owner] -= 1
        if not samples:
            del self._claimable[owner][order]
        return sample

    def forget(self, owner: str) -> None:
        """Withdraw every sample that only ``owner`` could claim."""
        for by_owner in (self._claimable, self._heaps, self.sizes):
            by_owner.pop(owner, None)

    def _key(self, owner: str | None, group: PromptGroup) -> Key:
        priority = self._priority(group)
        if group.birth is not None and group.birth <= self._overdue:
            return (0, group.birth, *priority)
        # What a worker holds may hold places of the user's own, such as sandboxes, that new samples wait for.
        return (1, owner is None, *priority)

    def _top(self, owner: str | None) -> Key | None:
        heap, held = self._heaps[owner], self._claimable[owner]
        while heap:
            samples = held.get(heap[0][-1])
            if samples and self._key(owner, samples[0].group) == heap[0]:
                return heap[0]
            heapq.heappop(heap)
        return None


class Slots:
    """The slots of all workers, and the queue of samples that wait for one.

    >>> from recipe.partial_rollout.manager.groups import Counters
    >>> from recipe.partial_rollout.manager.types import Prompt
    >>> group = PromptGroup(Prompt("0/0", {}), order=0, unfinished=4)
    >>> samples = Samples(Counters(), clock=lambda: 0.0)
    >>> samples.unfinished |= {f"0/0#{i}": Sample(f"0/0#{i}", group) for i in range(4)}
    >>> slots = Slots(ClaimQueue(get_scheduling_priority), samples)
    >>> slots.register("fast", 6)
    >>> slots.register("slow", 2)
    >>> for sample in samples.unfinished.values():
    ...     slots.queue.push(sample)
    >>> [sample.id for sample in slots.claim("fast")]
    ['0/0#0', '0/0#1', '0/0#2']
    >>> [sample.id for sample in slots.claim("slow")]
    ['0/0#3']
    """

    def __init__(self, queue: ClaimQueue, samples: Samples) -> None:
        self.queue = queue
        self._samples = samples
        self.workers: dict[str, int] = {}
        """slots of each worker that has joined and was not released; no two ever have the same name"""

    def register(self, worker: str, capacity: int) -> None:
        """Add a worker that can run ``capacity`` samples at once."""
        self.workers[worker] = capacity

    def release(self, worker: str) -> list[Sample]:
        """Forget a dead worker; returns the samples that it had: nobody owns them now."""
        self.workers.pop(worker, None)
        self.queue.forget(worker)
        return [sample for sample in self._samples.unfinished.values() if sample.worker == worker]

    def require(self, worker: str) -> None:
        """Raise RuntimeError if ``worker`` is not registered, or was released."""
        if worker not in self.workers:
            raise RuntimeError(f"worker {worker} is not registered: it was released, or never joined")

    def _free(self, worker: str) -> int:
        return self.workers[worker] - self._samples.running[worker]

    def claim(self, worker: str, limit: int | None = None, *, beyond_share: bool = False) -> Iterator[Sample]:
        """Up to ``limit`` samples by priority, for slots of ``worker``; the caller has each run before it asks for more.

        Of the samples that any worker could run it gets overdue ones, and others up to its share. Each sample is chosen
        when the iterator reaches it, because starting the one before may have changed the priority of its group.

        Args:
            limit: None stands for all its free slots.
            beyond_share: also take part of the samples that other workers have left unclaimed.
        """
        # Those that are away need no slot.
        present = len(self._samples.unfinished) - self._samples.away
        shared = math.ceil(present * self.workers[worker] / sum(self.workers.values()))
        shared -= self._samples.running[worker] + self.queue.sizes[worker]
        if beyond_share:
            shared = max(shared, math.ceil(self.queue.sizes[None] / len(self.workers)))
        free = self._free(worker)
        for _ in range(free if limit is None else min(limit, free)):
            if (sample := self.queue.pop(worker, own_only=shared <= 0)) is None:
                return
            shared -= sample.worker != worker
            yield sample

    def held_back(self, worker: str) -> bool:
        """Whether ``worker`` has free slots but got no more samples because it already has its share."""
        return self._free(worker) > 0 and self.queue.sizes[None] > 0
