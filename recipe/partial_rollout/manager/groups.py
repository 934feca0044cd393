"""All prompts between the data source and the trainer, and the states of their groups and samples.

Only ``Groups`` writes the state of a group, and only ``Samples`` that of a sample. A prompt waits in the ``Backlog``
until it is admitted. From admission to training it is a group. A checkpoint keeps both, but no workers, slots or claim
queue: after a crash no sample has an owner. The states of a group, and the methods (verbs) that change them::

    enter           start           ready          take          train
    ----> WAITING  ----->  ACTIVE  ----->  READY  ---->  TAKEN  ----->  TRAINED
                              |
                              |   filter
                              +-------->  FILTERED

Trained and filtered groups are counted and forgotten. ``VERBS`` has the states of a sample and their verbs. Each verb
checks the present state before it changes anything. So a message that comes twice or late raises RuntimeError and
changes nothing, and the counts and queues here agree with the states.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from recipe.partial_rollout.manager.policies import scores_differ
from recipe.partial_rollout.manager.types import (
    FilteredGroup,
    GroupState,
    Prompt,
    PromptGroup,
    Sample,
    SampleOutput,
    SampleState,
    TakenGroup,
    position_of,
)

_FOLLOWS = {
    GroupState.ACTIVE: GroupState.WAITING,
    GroupState.READY: GroupState.ACTIVE,
    GroupState.FILTERED: GroupState.ACTIVE,
    GroupState.TAKEN: GroupState.READY,
    GroupState.TRAINED: GroupState.TAKEN,
}
"""by state of a group: the only state from which it can be entered; a new group is WAITING"""
_ANEW = None
"""stands in ``VERBS`` for the state of a sample that no worker has: INTERRUPTED if it keeps tokens, else WAITING"""

VERBS: dict[str, tuple[Sequence[SampleState], SampleState | None]] = {
    "admit": ((SampleState.WAITING,), _ANEW),
    "claim": ((SampleState.WAITING, SampleState.INTERRUPTED), SampleState.RUNNING),
    "park": ((SampleState.RUNNING,), SampleState.PARKED),
    "interrupt": ((SampleState.RUNNING, SampleState.PARKED), SampleState.INTERRUPTED),
    "finish": ((SampleState.RUNNING, SampleState.PARKED), SampleState.FINISHED),
    "fail": ((SampleState.RUNNING, SampleState.PARKED), SampleState.FAILED),
    "mask": ((SampleState.FAILED,), SampleState.FINISHED),
    "retry": ((SampleState.FAILED,), _ANEW),
    "release_worker": ((SampleState.RUNNING, SampleState.INTERRUPTED, SampleState.PARKED), _ANEW),
}
"""by verb: the states that a sample may leave by it, and the one that it enters"""


@dataclass(slots=True)
class Backlog:
    """Prompts that were offered, in dispatch order, and are not admitted yet."""

    prompts: deque[Prompt] = field(default_factory=deque)
    last_enqueued: str | None = None
    """uid of the last prompt offered; prompts come in order, so it shows whether a prompt was offered before"""
    source_left: float = math.inf
    """prompts that the source still has; inf: not known yet"""

    def enqueue(self, prompts: Iterable[Prompt], source_left: float = math.inf) -> None:
        """Put prompts into the backlog, in training order; they start when admission allows.

        Args:
            source_left: prompts that the source has after these; 0: the groups in flight are the last ones.

        Raises:
            RuntimeError: a prompt does not come after the last one.
        """
        for prompt in prompts:
            last = self.last_enqueued
            if last is not None and position_of(prompt.uid) <= position_of(last):
                raise RuntimeError(f"prompt {prompt.uid} was offered twice, or out of order: the last one was {last}")
            self.prompts.append(prompt)
            self.last_enqueued = prompt.uid
        self.source_left = source_left


@dataclass(slots=True)
class Counters:
    """Totals since the first step of the run. They only grow; a resume restores those of its checkpoint."""

    admitted_groups: int = 0
    trained_groups: int = 0
    trained_tokens: int = 0
    passed_groups: int = 0
    """trained groups that were dispatched before every group still in flight"""
    passed_tokens: int = 0
    """response tokens of the ``passed_groups``"""
    interrupted: int = 0
    failed: int = 0
    """failures of agent loops and rewards"""
    masked: int = 0
    """samples that used up their retries"""
    filtered_groups: int = 0
    """groups consumed without being trained, because all samples have the same value of the filter's metric"""
    kept_groups: int = 0
    """groups trained although all samples have the same value: the version's limit on filtered groups was reached
    (``max_num_gen_batches``), or the remaining data could not fill a batch without the group"""
    parked_s: float = 0.0
    """seconds that samples were PARKED, summed over the samples"""
    lost_tokens: int = 0
    """tokens decoded for conversations that began anew: after a resume, a worker's death, or a failure of the sample"""


@dataclass(slots=True)
class Groups:
    """Every group that is neither trained nor filtered, and the totals of the others.

    >>> groups = Groups()
    >>> first, second = (groups.enter(Prompt(f"0/{i}", {}), samples=1) for i in range(2))
    >>> groups.start(first, version=3)
    >>> print(first.state, second.state, dict(groups.births))
    active waiting {None: 1, 3: 1}
    >>> groups.end_sample(first, tokens=100)
    >>> groups.ready(first)
    >>> (taken,) = groups.take(1)
    >>> print(first.state, second.state, groups.in_flight)
    taken waiting 1
    >>> groups.start(first, version=4)
    Traceback (most recent call last):
    RuntimeError: group 0/0 is taken, not waiting: it cannot become active
    """

    put: Callable[[Sequence[SampleOutput]], Any] = tuple
    """stores the outputs of a READY group, and returns the store's reference to them"""
    counters: Counters = field(default_factory=Counters)
    by_order: dict[int, PromptGroup] = field(default_factory=dict)
    """all groups, by dispatch order, ascending"""
    births: Counter[int | None] = field(default_factory=Counter)
    """number of groups in flight by birth version; under None, the number of WAITING ones"""
    ready_queue: list[PromptGroup] = field(default_factory=list)
    """READY groups by birth, then by dispatch order: the order in which they are trained"""
    trained: dict[int, int] = field(default_factory=dict)
    """response tokens by dispatch order, of the trained groups that overtook a group which is still in flight"""
    taken: list[PromptGroup] = field(default_factory=list)
    """TAKEN groups: the batch that the trainer has"""
    admitted: list[str] = field(default_factory=list)
    """uids of the groups admitted since the last ``train``; ``run.jsonl`` does not have them yet"""
    filtered: list[FilteredGroup] = field(default_factory=list)
    """groups FILTERED since the last ``train``; ``run.jsonl`` does not have them yet"""

    # -- verbs -----------------------------------------------------------------------------------------------------

    def enter(self, prompt: Prompt, samples: int) -> PromptGroup:
        """Add ``prompt`` as a WAITING group with ``samples`` samples, and return the group."""
        # The counter is part of a checkpoint, so no two groups of a run have one order, whatever crashes.
        group = PromptGroup(prompt, order=self.counters.admitted_groups, unfinished=samples)
        group.samples = [Sample(f"{prompt.uid}#{i}", group) for i in range(samples)]
        self.by_order[group.order] = group
        self.births[None] += 1
        self.counters.admitted_groups += 1
        self.admitted.append(group.uid)
        return group

    def restore(self, groups: Iterable[PromptGroup]) -> None:
        """Add ``groups`` of a checkpoint, with their samples, as WAITING, ACTIVE or READY: none is TAKEN."""
        for group in groups:
            group.unfinished = len(group.samples) - len(group.outputs)
            group.finished_length = sum(output.response_length for output in group.outputs)
            if group.unfinished:
                group.state = GroupState.WAITING if group.birth is None else GroupState.ACTIVE
            else:
                group.state = GroupState.READY
                self._store(group)
            self.births[group.birth] += 1
            self.by_order[group.order] = group
        # A checkpoint has groups by their states. Here they are in dispatch order, as ``in_state`` and ``train`` need.
        self.by_order = dict(sorted(self.by_order.items()))

    def start(self, group: PromptGroup, version: int) -> None:
        """WAITING -> ACTIVE: its first sample starts under the weights of ``version``."""
        self._move(group, GroupState.ACTIVE)
        group.birth = version
        self._no_longer(None)
        self.births[version] += 1

    def end_sample(self, group: PromptGroup, tokens: int) -> None:
        """Count a sample of an ACTIVE group as ended, with ``tokens`` response tokens.

        After the group's last sample call ``ready`` or ``filter``.
        """
        group.unfinished -= 1
        group.finished_length += tokens

    def ready(self, group: PromptGroup) -> None:
        """ACTIVE -> READY: every sample has ended."""
        self._move(group, GroupState.READY)
        self._store(group)

    def _store(self, group: PromptGroup) -> None:
        outputs = group.outputs
        group.drop_outputs()
        group.stored = self.put(outputs)
        # Kept sorted: every report asks whether the first N are a batch.
        insort(self.ready_queue, group, key=attrgetter("birth", "order"))

    def filter(self, group: PromptGroup, value: float) -> None:
        """ACTIVE -> FILTERED: every sample has ended, and ``value`` is the filter's metric in all of them."""
        self._move(group, GroupState.FILTERED)
        self._no_longer(group.birth)
        del self.by_order[group.order]
        outputs = group.outputs
        lengths = [output.response_length for output in outputs]
        differ = scores_differ(outputs)
        self.filtered.append(FilteredGroup(group.uid, group.order, group.birth, value, lengths, differ))
        self.counters.filtered_groups += 1
        group.drop_outputs()

    def take(self, count: int) -> list[TakenGroup]:
        """READY -> TAKEN: the trainer gets the first ``count`` groups; fewer only if there are no more."""
        batch = self.ready_queue[:count]
        del self.ready_queue[:count]
        for group in batch:
            self._move(group, GroupState.TAKEN)
            self._no_longer(group.birth)
        self.taken = batch
        return [TakenGroup(g.uid, g.order, g.prompt.row, g.stored, g.birth) for g in batch]

    def train(self) -> tuple[list[str], list[FilteredGroup]]:
        """TAKEN -> TRAINED: the trainer has updated on its batch.

        Returns:
            Uids of the groups admitted, and the groups filtered, since the last call, for ``run.jsonl``.
        """
        for group in self.taken:
            self._move(group, GroupState.TRAINED)
            del self.by_order[group.order]
            self.counters.trained_groups += 1
            self.counters.trained_tokens += group.finished_length
            self.trained[group.order] = group.finished_length
            group.drop_outputs()
        # Once every older group has left, too, a group's place in the order is final, and two totals stand for it; else
        # the dictionary would grow with the run.
        oldest = next(iter(self.by_order), self.counters.admitted_groups)
        for order in [order for order in self.trained if order < oldest]:
            self.counters.passed_groups += 1
            self.counters.passed_tokens += self.trained.pop(order)
        new = self.admitted, self.filtered
        self.taken, self.admitted, self.filtered = [], [], []
        return new

    def _move(self, group: PromptGroup, state: GroupState) -> None:
        if group.state is not _FOLLOWS[state]:
            raise RuntimeError(f"group {group.uid} is {group.state}, not {_FOLLOWS[state]}: it cannot become {state}")
        group.state = state

    def _no_longer(self, birth: int | None) -> None:
        """Lower ``births[birth]`` by one: such a group has left flight or, for None, has started."""
        self.births[birth] -= 1
        if not self.births[birth]:
            del self.births[birth]

    # -- readers ---------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Groups that are WAITING, ACTIVE or READY."""
        return len(self.by_order) - len(self.taken)

    @property
    def kept(self) -> int:
        """Groups admitted over the whole run, less the filtered ones."""
        return self.counters.admitted_groups - self.counters.filtered_groups

    @property
    def waiting_or_active(self) -> int:
        """Groups with a sample that has not finished."""
        return self.in_flight - len(self.ready_queue)

    @property
    def carried(self) -> int:
        """Number of groups that are ACTIVE or READY. If a version began now, it would carry them."""
        return self.in_flight - self.births[None]

    @property
    def lost(self) -> int:
        """Number of admitted groups that are neither here nor trained nor filtered: always 0."""
        return self.kept - self.counters.trained_groups - len(self.by_order)

    def in_state(self, *states: GroupState) -> Iterator[PromptGroup]:
        """Groups in one of ``states``, by dispatch order."""
        return (group for group in self.by_order.values() if group.state in states)

    def oldest_birth(self, default: int) -> int:
        """Birth version of the oldest group in flight; ``default`` if none is born."""
        return min((birth for birth in self.births if birth is not None), default=default)

    def length_bias(self) -> dict[str, float]:
        """Return how long the responses of trained groups are, as ratios to those of as many groups in dispatch order.

        A ratio is 1 if groups train in the order of the data, and below 1 if short groups, which finish first, overtake
        long ones. The batch that the trainer has counts as trained. With b groups in that batch, after t trained ones:

        * ``length/bias``: tokens of all t + b groups, over those of the first t + b groups in dispatch order;
        * ``length/batch_bias``: tokens of the b groups, over those of the groups t to t + b - 1 in dispatch order.

        A group with unfinished samples counts with its tokens so far. Filtered groups are left out: dynamic sampling
        selects them, not the scheduling. A ratio is missing while its divisor is 0, as before the first batch.
        """
        totals = self.counters
        lengths = self.trained | {order: group.length for order, group in self.by_order.items()}
        dispatched = [lengths[order] for order in sorted(lengths)]
        batch, trained = len(self.taken), totals.trained_groups - totals.passed_groups
        batch_tokens = sum(group.length for group in self.taken)
        in_order = sum(dispatched[trained : trained + batch])
        first = totals.passed_tokens + sum(dispatched[:trained]) + in_order
        biases = {}
        if first:
            biases["length/bias"] = (totals.trained_tokens + batch_tokens) / first
        if in_order:
            biases["length/batch_bias"] = batch_tokens / in_order
        return biases


class Samples:
    """The samples that have not finished, and their transitions.

    >>> samples = Samples(Counters(), clock=lambda: 0.0)
    >>> samples.unfinished["0/0#0"] = Sample("0/0#0", PromptGroup(Prompt("0/0", {}), order=0))
    >>> [str(samples.move("0/0#0", verb).state) for verb in ("claim", "park", "interrupt")]
    ['running', 'parked', 'interrupted']
    >>> samples.move("0/0#0", "finish")
    Traceback (most recent call last):
    RuntimeError: finish: sample 0/0#0 is interrupted, not running or parked

    Args:
        counters: ``move`` adds to its ``interrupted``, ``lost_tokens`` and ``parked_s``.
        clock: seconds; stamped on state changes for stall reports.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._clock = clock
        self.unfinished: dict[str, Sample] = {}
        """by id"""
        self.running: Counter[str | None] = Counter()
        """number of RUNNING samples by worker; each holds a slot. None has 0"""
        self.parked = 0
        """number of PARKED samples, which live on without a slot"""

    def move(self, sample_id: str, verb: str) -> Sample:
        """Move a sample to another state, as ``VERBS[verb]`` says; return it.

        Raises:
            RuntimeError: the sample is not in a state from which ``verb`` leads, or it has finished.
        """
        leaves, enters = VERBS[verb]
        sample, now = self.in_state(sample_id, verb, leaves), self._clock()
        if sample.state is SampleState.PARKED:
            self._counters.parked_s += now - sample.since
        # A parked sample that asks for a slot again was not interrupted: it gave its slot back before.
        elif verb == "interrupt":
            self._counters.interrupted += 1
        if enters is None:
            # Its agent loop is gone. A single-turn sample keeps its tokens; those of a conversation are lost.
            decoded, sample.segments = sample.cached_tokens, sample.lasting_segments
            self._counters.lost_tokens += decoded - sample.cached_tokens
            enters = SampleState.INTERRUPTED if sample.segments else SampleState.WAITING
        self.running[sample.worker] += (enters is SampleState.RUNNING) - (sample.state is SampleState.RUNNING)
        self.parked += (enters is SampleState.PARKED) - (sample.state is SampleState.PARKED)
        sample.state, sample.since = enters, now
        return sample

    def in_state(self, sample_id: str, verb: str, states: Sequence[SampleState]) -> Sample:
        """Return the sample, which must be in one of ``states``; else raise RuntimeError, which names ``verb``."""
        sample = self.unfinished.get(sample_id)
        if sample is None or sample.state not in states:
            actual = "unknown or finished" if sample is None else sample.state
            raise RuntimeError(f"{verb}: sample {sample_id} is {actual}, not {' or '.join(states)}")
        return sample

    def report(self, limit: int = 8) -> str:
        """Describe the unfinished samples in one line for an error: their number, then the ``limit`` oldest changes."""
        live, now = sorted(self.unfinished.values(), key=lambda sample: sample.since), self._clock()
        rows = [
            f"{s.id} {s.state} on {s.worker or 'no worker'} for {now - s.since:.0f} s ({s.cached_tokens} tokens cached"
            + (f"; failed {s.failures} times, last: {s.error})" if s.error is not None else ")")
            for s in live[:limit]
        ]
        return f"{len(live)} unfinished samples, longest unchanged first: {'; '.join(rows)}"
