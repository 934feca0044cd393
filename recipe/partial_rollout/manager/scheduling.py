"""Which sample runs next, and where: the claim queue, and the slots of the workers.

An order is a function of a group that returns a sort key, smaller first: one of ``SchedulingPolicy``, or a user's own.
A user's order may depend on anything. ``ClaimQueue`` calls it when a sample is queued, when its group starts and when a
sample of its group ends, and keeps the key in between. Three rules rank above the key:

1. Overdue groups, those at ``max_staleness``, come first: they must finish in this round.
2. A worker gets samples whose conversation it holds before samples that any worker could run.
3. Where ``scheduling.overtake`` sets a limit, started groups come before prompts, which start in the order of the data.

So no order can break the bound on staleness (``admission``), or keep a sample from being run.

``ClaimQueue`` has a heap of groups for each owner: each worker that holds conversations, and None for samples of any
worker. A group that gets a new key gets a new entry. The old entry stays in the heap and is skipped later, as is an
entry whose group has no more samples queued for that owner. So a claim costs O(log n). Once a version, when more groups
become overdue, the heaps are rebuilt.

Workers share samples in proportion to their slots: a worker claims samples that any worker could run only until it has
its share. While such a sample is queued, some worker below its share has a free slot, or all slots are taken. So once
every worker has claimed, no slot is free while such a sample is queued.
"""

from __future__ import annotations

import heapq
import importlib
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from operator import itemgetter
from types import MappingProxyType
from typing import Any, assert_never

from msgspec import Struct

from recipe.partial_rollout.config.keys import refusing
from recipe.partial_rollout.config.settings import ROOT, Scheduling, SchedulingPolicy
from recipe.partial_rollout.manager.groups import Samples
from recipe.partial_rollout.manager.types import PromptGroup, Sample
from recipe.partial_rollout.waits import one_line

POLICY = f"{ROOT}.scheduling.policy"


class QueuedGroup(Struct, frozen=True):
    """A read-only view of a group, which a user's own order gets."""

    uid: str
    """``epoch/position`` of its prompt in the data"""
    order: int
    """position among all prompts of the run, from 0; of two equal keys the smaller position runs first"""
    row: Mapping[str, Any]
    """columns of its row of the dataset, such as ``raw_prompt`` and ``extra_info``"""
    birth: int | None
    """policy version under which its first sample started; None if none has started"""
    samples: int
    """number of its samples"""
    unfinished: int
    """number of its samples that have not finished"""
    mean_finished_length: float
    """mean response length of its finished samples, tokens; 1e9 if none has finished, which sorts last"""
    tokens: int
    """response tokens of all its samples so far; of running samples, those that their workers have reported"""


Order = Callable[[PromptGroup], Sequence[float] | float]
"""returns a group's key, a number or a sequence of numbers; the group with the smaller key runs first"""
Key = tuple[Any, ...]


def get_scheduling_priority(
    group: PromptGroup, policy: SchedulingPolicy = SchedulingPolicy.BOUNDED
) -> tuple[float, ...]:
    """Sort key of ``group``: of two groups with a claimable sample, the one with the smaller key runs first.

    The key uses the number of unfinished samples, the mean length of the finished ones and the birth version, which
    stands for staleness.
    """
    birth = math.inf if group.birth is None else group.birth
    match policy:
        case SchedulingPolicy.BOUNDED:
            return (birth, group.unfinished, group.mean_finished_length)
        case SchedulingPolicy.SEED:
            # Ascending staleness is descending birth, so the order does not change as the version advances.
            return (group.unfinished, group.mean_finished_length, -birth)
        case _:
            assert_never(policy)


def order_of(scheduling: Scheduling, batch_groups: int) -> Order:
    """Return the order that ``scheduling`` asks for; ``batch_groups`` is N.

    Raises:
        ConfigError: ``scheduling.policy`` names a function that cannot be imported.
    """
    policy, positions = scheduling.policy, scheduling.positions(batch_groups)
    if isinstance(policy, SchedulingPolicy):
        order: Order = partial(get_scheduling_priority, policy=policy)
    else:
        order = _imported(policy)
    if positions is None:
        return order
    if positions == 0:
        return lambda group: ()
    # A batch may be at most so many positions ahead of an unfinished group. Prompts that start out of turn would fill the
    # window with groups that have to wait for the ones they left behind.
    return lambda group: (True,) if group.birth is None else (False, *_numbers(order(group)))


def _imported(path: str) -> Order:
    module, _, name = path.rpartition(".")
    with refusing(POLICY, path, "a function that can be imported"):
        found: Callable[[QueuedGroup], Any] = getattr(importlib.import_module(module), name)
        if not callable(found):
            raise TypeError(f"{name} is a {type(found).__name__}, not a function")
    return lambda group: found(
        QueuedGroup(
            uid=group.uid,
            order=group.order,
            row=MappingProxyType(group.prompt.row),
            birth=group.birth,
            samples=len(group.samples),
            unfinished=group.unfinished,
            mean_finished_length=group.mean_finished_length,
            tokens=group.length,
        )
    )


def _numbers(key: Any) -> Sequence[Any]:
    """Return ``key`` as a sequence of numbers that can be compared.

    Raises:
        TypeError, ValueError: ``key`` holds something that is not a number, or a nan.
    """
    numbers = key if isinstance(key, tuple | list) else (key,)
    for number in numbers:
        # Looking up an abstract class takes longer than the key: the usual types go first.
        if not isinstance(number, (int, float, Real)):
            raise TypeError(f"returned {key!r:.60}, not a number or a tuple of numbers")
        if number != number:
            raise ValueError(f"returned {key!r:.60}: nan cannot be ordered")
    return numbers


class ClaimQueue:
    """Samples that wait for a slot.

    A sample with an owner can be claimed only by that worker, which holds its conversation. A sample without an owner
    (None) can be claimed by any worker.

    ``pop`` gives a worker samples of overdue groups first, then its own samples, then samples without an owner. Overdue
    groups are sorted by birth, then by key; other groups by key. Groups with equal keys
    stay in the order of the data. So a group's entry in a heap is

    * (0, birth, KEY, order) if it is overdue,
    * (1, owner is None, KEY, order) otherwise. KEY of policy ``bounded`` is birth, unfinished samples, mean finished
      length::

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

    If ``order`` raises, or returns something that is no number, the group is queued by the order of the data alone.
    ``problem`` keeps the first error, and the manager then ends the run.

    Args:
        order: returns a group's key; a smaller key runs first.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._overdue = -math.inf
        """groups born at this version or before are overdue and come first"""
        self._claimable: defaultdict[str | None, dict[int, deque[Sample]]] = defaultdict(dict)
        """queued samples, by owner and by their group's ``order``"""
        self._entries: defaultdict[str | None, dict[int, Key]] = defaultdict(dict)
        """by owner and ``order``: the valid heap entry of each group with a queued sample, which ends in ``order``"""
        self._heaps: defaultdict[str | None, list[Key]] = defaultdict(list)
        """by owner: the valid entries of its groups, and old ones that ``_top`` skips"""
        self.sizes: Counter[str | None] = Counter()
        """by owner: number of queued samples; under None, of those that any worker can claim"""
        self.problem: str | None = None
        """the first failure of ``order``, in one line"""

    def push(self, sample: Sample) -> None:
        """Queue ``sample``. Only its worker can claim it; any worker can if ``sample.worker`` is None."""
        owner, group = sample.worker, sample.group
        self._claimable[owner].setdefault(group.order, deque()).append(sample)
        self.sizes[owner] += 1
        self._file(owner, group, self._key(group))

    def refresh(self, group: PromptGroup) -> None:
        """Compute the key of ``group`` again. Call it when the group has started or one of its samples has ended."""
        # Samples of a group may wait for several owners, and each owner has an entry of its own.
        owners = [each for each in {s.worker for s in group.samples} if group.order in self._claimable.get(each, ())]
        if owners:
            key = self._key(group)
            for owner in owners:
                self._file(owner, group, key)

    def make_overdue(self, birth: float) -> None:
        """From here on groups born at version ``birth``, or before, come first."""
        # Each claim calls this, and the value changes once a version.
        if birth == self._overdue:
            return
        self._overdue = birth
        for owner, claimable in self._claimable.items():
            entries = self._entries[owner]
            for order, samples in claimable.items():
                # The key stays as it was: an order of the user's may be slow, or fail.
                entries[order] = self._entry(owner, samples[0].group, entries[order][2:])
            self._heaps[owner] = list(entries.values())
            heapq.heapify(self._heaps[owner])

    def pop(self, worker: str, *, own_only: bool = False) -> Sample | None:
        """Remove and return the next sample for ``worker``; None if there is none.

        Args:
            own_only: leave samples that any worker could claim to other workers, unless they are overdue.
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
            del self._claimable[owner][order], self._entries[owner][order]
        return sample

    def forget(self, owner: str) -> None:
        """Withdraw every sample that only ``owner`` could claim."""
        for by_owner in (self._claimable, self._entries, self._heaps, self.sizes):
            by_owner.pop(owner, None)

    def _key(self, group: PromptGroup) -> Key:
        """Return the key of ``group`` in its present state, followed by the group's ``order``."""
        try:
            key = _numbers(self._order(group))
        except Exception as error:
            self.problem = self.problem or f"its key of group {group.uid}: {one_line(error)}"
            key = ()
        return (*key, group.order)

    def _entry(self, owner: str | None, group: PromptGroup, key: Key) -> Key:
        if group.birth is not None and group.birth <= self._overdue:
            return (0, group.birth, *key)
        # The worker's own samples first: they may occupy the user's sandboxes, for which new samples wait.
        return (1, owner is None, *key)

    def _file(self, owner: str | None, group: PromptGroup, key: Key) -> None:
        entry = self._entry(owner, group, key)
        if self._entries[owner].get(group.order) != entry:
            # The old entry stays in the heap, stale, and is skipped at the top: to search it would cost O(n).
            self._entries[owner][group.order] = entry
            heapq.heappush(self._heaps[owner], entry)

    def _top(self, owner: str | None) -> Key | None:
        heap, entries = self._heaps[owner], self._entries[owner]
        while heap and entries.get(heap[0][-1]) != heap[0]:
            heapq.heappop(heap)
        return heap[0] if heap else None


class Slots:
    """The slots of all workers, and the queue of samples that wait for one.

    Four samples, and two workers with 6 and 2 slots: their shares are 3 samples and 1 sample.

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
        """by name: number of slots of each worker that has joined and was not released; a name is never used twice"""

    def register(self, worker: str, capacity: int) -> None:
        """Add a worker that can run ``capacity`` samples at once."""
        self.workers[worker] = capacity

    def release(self, worker: str) -> list[Sample]:
        """Forget a dead worker and its queue, and return the samples that it had; the caller queues them again."""
        self.workers.pop(worker, None)
        self.queue.forget(worker)
        return [sample for sample in self._samples.unfinished.values() if sample.worker == worker]

    def require(self, worker: str) -> None:
        """Raise RuntimeError if ``worker`` is not registered, or was released."""
        if worker not in self.workers:
            raise RuntimeError(f"worker {worker} is not registered: it was released, or never joined")

    def claim(self, worker: str, limit: int | None = None) -> Iterator[Sample]:
        """Yield up to ``limit`` samples for free slots of ``worker``, by priority.

        Of the samples that any worker could run, ``worker`` gets overdue ones, and others up to its share. The caller
        must move each sample to RUNNING before it takes the next: that may change the priority of the sample's group.

        Args:
            limit: None stands for all free slots of ``worker``.
        """
        # Parked samples need no slot.
        present = len(self._samples.unfinished) - self._samples.parked
        # Rounded up: shares that are rounded down may leave a sample that no worker claims.
        shared = math.ceil(present * self.workers[worker] / sum(self.workers.values()))
        shared -= self._samples.running[worker] + self.queue.sizes[worker]
        free = self.workers[worker] - self._samples.running[worker]
        for _ in range(free if limit is None else min(limit, free)):
            if (sample := self.queue.pop(worker, own_only=shared <= 0)) is None:
                return
            # Samples whose conversation it holds were subtracted above.
            shared -= sample.worker != worker
            yield sample
