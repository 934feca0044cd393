"""The state of partial rollout: which prompts are in flight, and where each sample of them stands.

A pure state machine, driven by verbs: no Ray, no asyncio, no torch, no clock of its own. It guarantees that

* every prompt offered is consumed exactly once: a group leaves by ``acknowledge``, or FILTERED, as its last sample ends;
* no group is trained later than ``max_staleness`` versions after its first sample started: ``round_complete`` says no
  while stopping would leave more groups than the coming rounds can train in time;
* a sample has one owner: it is claimable, or one worker has a slot for it, or it awaits its retry, or it has ended.

All of it holds across ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from recipe.partial_rollout.config.choices import SchedulingPolicy
from recipe.partial_rollout.manager import report as manager_report
from recipe.partial_rollout.manager.admission import Load
from recipe.partial_rollout.manager.codec import Captured, capture, decode, encode
from recipe.partial_rollout.manager.lifecycle import SampleLifecycle
from recipe.partial_rollout.manager.types import (
    FilteredGroup,
    FinishedOutput,
    GroupState,
    Prompt,
    PromptGroup,
    Sample,
    SampleOutput,
    TakenGroup,
    position_of,
)


class PromptsManager(SampleLifecycle):
    """Owner of all prompts between the data source and the trainer."""

    # -- prompts ---------------------------------------------------------------------------------------------------

    def offer(self, prompts: Iterable[Prompt]) -> None:
        """Put prompts in reserve, in training order; they start when admission allows.

        Raises:
            RuntimeError: one does not come after the last: a source that resumed elsewhere than the manager did.
        """
        state = self._state
        for prompt in prompts:
            if state.last_offered is not None and prompt.position <= position_of(state.last_offered):
                last = state.last_offered
                raise RuntimeError(f"prompt {prompt.uid} was offered twice, or out of order: the last one was {last}")
            state.reserve.append(prompt)
            state.last_offered = prompt.uid

    def note_source(self, left: int) -> None:
        """The source has ``left`` prompts yet to offer; with none it is closed."""
        self._source_left = left
        if not left:
            self.close_source()

    def close_source(self) -> None:
        """No more prompts will be offered: what is in flight drains."""
        self._state.source_open = False

    @property
    def wanted(self) -> int:
        """Prompts to offer so that the next round never runs short of them, but for those that replace filtered ones."""
        state, admission = self._state, self._admission
        spare = admission.batch_groups if self._group_filter is not None else 0
        return max(0, admission.most_per_round() + spare - len(state.reserve)) if state.source_open else 0

    @property
    def short_of_prompts(self) -> bool:
        """Whether the round may soon filter more groups than the reserve can replace."""
        state = self._state
        filters = self._group_filter is not None and state.source_open
        return self.round_open and filters and len(state.reserve) < self._admission.batch_groups

    def admit(self, *, round_start: bool = False) -> int:
        """Move prompts from the reserve into flight as far as the mode allows; returns how many."""
        state, admitted = self._state, 0
        while state.reserve and self._admission.allows(self._load(), round_start=round_start, version=self.version):
            self._start(state.reserve.popleft())
            self._to_replace = max(0, self._to_replace - 1)
            admitted += 1
        return admitted

    def _load(self) -> Load:
        state, counters = self._state, self.counters
        kept = counters.admitted_groups - counters.filtered_groups
        return Load(len(state.groups), state.unfinished_groups, len(state.samples), kept, self._to_replace)

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

    # -- rounds ----------------------------------------------------------------------------------------------------

    def advance_version(self, version: int) -> None:
        """What is claimed from here on is decoded by the weights of ``version``."""
        if version < self.version:
            raise RuntimeError(f"policy version went from {self.version} back to {version}")
        self._state.version = version

    def open_round(self) -> int:
        """Admit what the mode starts a round with, and let workers claim; returns the groups admitted."""
        if self.round_open:
            raise RuntimeError("the round is open already")
        self._filtered_this_round = self._to_replace = 0
        most = min(self._admission.most_per_round(), len(self._state.reserve))
        admitted = self.admit(round_start=True)
        self._state.paced = max(0, most - admitted)
        self.round_open = True
        return admitted

    def set_overlap(self, overlap: float) -> None:
        """Spare groups in flight from here on, as a share of N; what is in flight already stays.

        Raises:
            ValueError: more than ``max_staleness``: they could not all be trained in time.
        """
        if not 0 <= overlap <= self._admission.max_staleness:
            raise ValueError(f"overlap {overlap:g}: 0 to max_staleness={self._admission.max_staleness}")
        self._admission = replace(self._admission, overlap=overlap)

    def close_round(self) -> tuple[str, ...]:
        """No more claims: running samples are about to be interrupted; returns the uids admitted since the last batch."""
        self.round_open = False
        return tuple(self._state.admitted)

    def suspend_round(self) -> None:
        """No more claims, before the batch is complete: the run is to be checkpointed and to end."""
        self.round_open = False

    def round_complete(self) -> bool:
        """Whether N groups are ready and stopping now leaves every other group trainable in time."""
        size = self._admission.batch_groups
        if len(self._state.ready) < size:
            return self._drained()
        if self._policy is SchedulingPolicy.IN_ORDER:
            # No group is dispatched more than ``max_staleness`` batches ahead of its turn, so each is trained in time.
            return not any(group.unfinished for group in self._next_in_order())
        return self._feasible_after(size)

    def _next_in_order(self) -> Iterator[PromptGroup]:
        """The first N groups in flight by dispatch order; fewer only when there are no more."""
        return itertools.islice(self._state.groups.values(), self._admission.batch_groups)

    def _drained(self) -> bool:
        state = self._state
        return not state.source_open and not state.reserve and not state.unfinished_groups

    @property
    def exhausted(self) -> bool:
        """Whether the data has ended with fewer prompts left than a batch needs: no other round can be completed.

        Only dynamic sampling leaves such a rest, as it consumes more prompts than it trains.
        """
        state = self._state
        ended = self._group_filter is not None and not state.source_open
        return ended and len(state.groups) + len(state.reserve) < self._admission.batch_groups

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

    # -- batches ---------------------------------------------------------------------------------------------------

    def take_batch(self) -> list[TakenGroup[FinishedOutput]]:
        """The N oldest ready groups (in_order: the first N dispatched), READY -> TAKEN; fewer only once the data ran out.

        Raises:
            RuntimeError: the round is not complete.
        """
        state, size = self._state, self._admission.batch_groups
        if len(state.ready) < size and not self._drained():
            raise RuntimeError(f"take_batch: {len(state.ready)} groups are ready, {size} are needed")
        if self._policy is SchedulingPolicy.IN_ORDER:
            batch = list(self._next_in_order())
            for group in batch:
                state.ready.remove(group)
        else:
            batch = state.ready.take(size)
        state.admitted = []
        for group in batch:
            group.handed_over = GroupState.TAKEN
            state.taken[group.uid] = state.groups.pop(group.uid)
        return [self._view(group) for group in batch]

    @staticmethod
    def _view(group: PromptGroup) -> TakenGroup[FinishedOutput]:
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
            group.drop_outputs()
        state.lengths.fold(state.counters.trained_groups)

    def take_filtered(self) -> tuple[FilteredGroup, ...]:
        """The groups filtered since this was last asked, for the ledger."""
        filtered, self._state.filtered = tuple(self._state.filtered), []
        return filtered

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def capture(self) -> Captured:
        """What ``state_dict`` says of this moment, cheap: ``encode`` makes the rest of it, anywhere and later."""
        return capture(self._state, self._admission)

    def state_dict(self) -> dict[str, Any]:
        """All but the workers, in plain Python and numpy; layout in ``manager_codec``."""
        return encode(self.capture())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``: unfinished samples are claimable, groups with the trainer are ready again.

        The source is open: a training that is resumed may have more steps than the one that drained.

        Raises:
            ValueError: made with another batch or group size, or a larger ``max_staleness`` than this run allows.
            RuntimeError: this manager has prompts already.
        """
        if self._state.reserve or self.counters.admitted_groups:
            raise RuntimeError("load_state_dict: the manager has prompts already; load before the first offer")
        self._state = decode(state, self._admission)
        self._state.source_open = True
        for sample in self._state.samples.values():
            self._requeue(sample)

    def store_outputs(self, put: Callable[[Sequence[tuple[str, SampleOutput]]], Sequence[FinishedOutput]]) -> None:
        """Have ``put`` keep every output that is here, a group at a time: those that a checkpoint brought back."""
        for group in self._state.by_order.values():
            here = [sample for sample in group.samples if isinstance(sample.output, SampleOutput)]
            stored = put([(sample.id, sample.output) for sample in here if isinstance(sample.output, SampleOutput)])
            for sample, output in zip(here, stored, strict=True):
                sample.output = output

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
        """See ``manager_report.gauges``; with dynamic sampling those of ``manager_report.filter_gauges`` too."""
        gauges = manager_report.gauges(self._state, self._admission.samples_per_group)
        return gauges if self._group_filter is None else {**gauges, **manager_report.filter_gauges(self._state)}

    def unfinished_report(self, limit: int = 8) -> str:
        """See ``manager_report.unfinished_report``."""
        return manager_report.unfinished_report(self._state, self._clock(), limit)
