"""One rollout phase: which prompts start in it, which ended groups it filters, and when its batch is complete.

Where trainer and engines share their devices, a round begins with each version and ends with its batch. Where each side
has devices of its own (separate placement), there is one round that never closes::

    colocated    CLOSED --open--> OPEN --close--> CLOSED        the batch is taken while CLOSED

    separate     CLOSED --next_version--> OPEN --next_batch--> AHEAD
                                           ^                     |
                                           +----next_version-----+

Both take N groups a version and admit at its start, so pacing and the bound on staleness are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission, Load, pacing_load
from recipe.partial_rollout.manager.group_filter import GroupFilter
from recipe.partial_rollout.manager.state import ManagerState
from recipe.partial_rollout.manager.types import Prompt, PromptGroup

if TYPE_CHECKING:
    from recipe.partial_rollout.manager.samples import Samples


class RoundState(StrEnum):
    CLOSED = "closed"
    """No sample may be claimed."""
    OPEN = "open"
    """Samples run; the batch of this version is to come."""
    AHEAD = "ahead"
    """Samples run while the trainer has the batch of this version (separate placement)."""


class Round:
    """Decides in each round what starts, what is filtered and when to stop; changes state only through its owners.

    Args:
        admission: mode and sizes.
        scheduling: which READY groups a batch may have.
        group_filter: which finished groups are replaced; None: none.
    """

    def __init__(
        self,
        state: ManagerState,
        samples: Samples,
        admission: Admission,
        scheduling: Scheduling,
        group_filter: GroupFilter | None,
    ) -> None:
        self._state = state
        self._samples = samples
        self.admission = admission
        self._scheduling = scheduling
        self.group_filter = group_filter
        self._phase = RoundState.CLOSED
        self._batch_taken = False
        """whether the trainer has got the batch of the present version"""
        self._filtered = 0
        """groups filtered in this round, or since the version advanced"""
        self._to_replace = 0
        """of these, the groups that are not replaced yet"""

    # -- begin and end ---------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether workers may claim."""
        return self._phase is not RoundState.CLOSED

    def open(self) -> int:
        """CLOSED -> OPEN: admit what the mode starts a round with; returns the groups admitted."""
        if self.is_open:
            raise RuntimeError("the round is open already")
        return self._begin()

    def next_version(self, version: int, prompts: Iterable[Prompt]) -> int:
        """AHEAD -> OPEN, or CLOSED -> OPEN the first time: all engines hold ``version``; returns the groups admitted.

        Args:
            prompts: offered before admission is asked.

        Raises:
            RuntimeError: the batch of the present version is not trained yet, or ``version`` is not the one after it.
        """
        present = self._state.version
        if self._phase is RoundState.OPEN or self._state.groups.taken:
            raise RuntimeError(f"next_version: the batch of version {present} is not trained: {version} cannot follow")
        if self._phase is RoundState.AHEAD and version != present + 1:
            raise RuntimeError(f"next_version: {version} after {present}: each version trains one batch")
        self._state.advance(version)
        self._state.reserve.offer(prompts)
        return self._begin()

    def begin_version(self, version: int) -> int:
        """CLOSED, AHEAD -> OPEN: admit the groups of ``version``, let workers claim; returns the groups admitted.

        Raises:
            RuntimeError: the batch of the present version was not taken, or must be trained first, or another version
                follows it.
        """
        present = self._state.version
        ahead = self._phase is RoundState.AHEAD
        if self._phase is RoundState.OPEN or (ahead and self._state.groups.taken):
            state = "trained" if ahead else "taken"
            raise RuntimeError(f"begin_version: the batch of version {present} is not {state}: {version} cannot follow")
        if self._batch_taken and version != present + 1:
            raise RuntimeError(f"begin_version: {version} after {present}: each version trains one batch")
        self._state.advance(version)
        return self._begin()

    def take_batch(self, *, stop: bool) -> list[PromptGroup]:
        """The batch, as ``batch`` has it. OPEN -> CLOSED with ``stop``, else OPEN -> AHEAD: everything else runs on.

        Raises:
            RuntimeError: it is not complete, or the round is not OPEN.
        """
        self.require_open("take_batch")
        if self._state.groups.taken:
            raise RuntimeError(f"take_batch: the batch before that of version {self._state.version} is not trained")
        batch = self.batch()
        self._phase = RoundState.CLOSED if stop else RoundState.AHEAD
        self._batch_taken = True
        return batch

    def _begin(self) -> int:
        self._batch_taken = False
        self._filtered = self._to_replace = 0
        most = min(self.admission.most_per_round(), len(self._state.reserve))
        admitted = self.admit(round_start=True)
        self._state.paced = max(0, most - admitted)
        self._phase = RoundState.OPEN
        return admitted

    def close(self) -> None:
        """OPEN, AHEAD -> CLOSED: stop claims."""
        self._phase = RoundState.CLOSED

    def next_batch(self) -> list[PromptGroup]:
        """OPEN -> AHEAD: the batch, as ``batch`` has it; everything else runs on.

        Raises:
            RuntimeError: it is not complete, or the round is not OPEN.
        """
        self.require_open("next_batch")
        batch = self.batch()
        self._phase = RoundState.AHEAD
        return batch

    def require_open(self, verb: str) -> None:
        """Raise RuntimeError, which names the state, unless the batch of this version is to come."""
        if self._phase is not RoundState.OPEN:
            raise RuntimeError(f"{verb}: the round is {self._phase}: call begin_version first")

    @property
    def overdue(self) -> int:
        """Groups born at this version or before must be in the next batch."""
        return self._state.version + (self._phase is RoundState.AHEAD) - self.admission.max_staleness

    def complete(self) -> bool:
        """Whether N groups are ready, none too far ahead of an unfinished one, and all others can be trained in time.

        It is once nothing in flight is unfinished, so a round always ends. Never while the trainer has this version's
        batch: the next one belongs to the next version.
        """
        if self._phase is RoundState.AHEAD:
            return False
        groups, size = self._state.groups, self.admission.batch_groups
        if len(groups.ready_queue) < size:
            return self._drained()
        in_time = groups.in_time_after(size, self._state.version, self.admission.max_staleness)
        return in_time and self._in_turn(groups.oldest_ready(size))

    def _in_turn(self, batch: list[PromptGroup]) -> bool:
        """Whether no group of ``batch`` overtakes an unfinished one by more positions than ``scheduling`` allows."""
        positions = self._scheduling.positions(self.admission.batch_groups)
        if positions is None or (oldest := self._state.groups.oldest_unfinished) is None:
            return True
        return max(group.order for group in batch) <= oldest.order + positions

    def _drained(self) -> bool:
        reserve = self._state.reserve
        return not (reserve.source_open or reserve or self._state.groups.waiting_or_active)

    def batch(self) -> list[PromptGroup]:
        """The N oldest ready groups; fewer only once the data ran out.

        Raises:
            RuntimeError: the round is not complete.
        """
        groups, size = self._state.groups, self.admission.batch_groups
        if not self.complete():
            raise RuntimeError(
                f"take_batch: the round is not complete: {len(groups.ready_queue)} groups are ready, {size} are needed"
            )
        return groups.oldest_ready(size)

    # -- prompts that start ----------------------------------------------------------------------------------------

    def set_overlap(self, overlap: float) -> None:
        """Spare groups in flight from here on, as a share of N.

        Raises:
            ValueError: more than ``max_staleness``: they could not all be trained in time.
        """
        if not 0 <= overlap <= self.admission.max_staleness:
            raise ValueError(f"overlap {overlap:g}: 0 to max_staleness={self.admission.max_staleness}")
        self.admission = replace(self.admission, overlap=overlap)

    def admit(self, *, round_start: bool = False) -> int:
        """Move prompts from the reserve into flight as far as the mode allows; returns how many."""
        state, admitted = self._state, 0
        while state.reserve and self.admission.allows(self._load(), round_start=round_start):
            self._samples.enter(state.groups.enter(state.reserve.pop(), self.admission.samples_per_group))
            self._to_replace = max(0, self._to_replace - 1)
            admitted += 1
        return admitted

    def _load(self) -> Load:
        groups = self._state.groups
        kept = groups.counters.admitted_groups - groups.counters.filtered_groups
        counted = pacing_load(kept, groups.in_flight, self.admission.batch_groups, self._state.version)
        return Load(counted, groups.waiting_or_active, len(self._samples), kept, self._to_replace)

    @property
    def wanted(self) -> int:
        """Prompts to offer so that the next round never runs short; replacements for filtered groups are not counted."""
        reserve, admission = self._state.reserve, self.admission
        spare = admission.batch_groups if self.group_filter is not None else 0
        return max(0, admission.most_per_round() + spare - len(reserve)) if reserve.source_open else 0

    # -- groups that end -------------------------------------------------------------------------------------------

    def sample_ended(self, group: PromptGroup) -> None:
        """After its last sample make ``group`` READY, or FILTERED (and to be replaced) if all samples score alike.

        Raises:
            MissingMetricError: the group cannot be judged by ``algorithm.filter_groups``.
        """
        if group.unfinished:
            return
        groups = self._state.groups
        value = self.group_filter.common_value(group.outputs) if self.group_filter is not None else None
        if value is not None and self._may_filter():
            groups.filter(group, value)
            self._filtered += 1
            self._to_replace += self.is_open
        else:
            groups.counters.spared_groups += value is not None
            groups.ready(group)

    def _may_filter(self) -> bool:
        """Whether the round's limit allows one more, and the remaining data can still fill a batch without it."""
        assert self.group_filter is not None
        reserve, size = self._state.reserve, self.admission.batch_groups
        most = self.group_filter.most_a_round(size)
        if most is not None and self._filtered >= most:
            return False
        return self._state.groups.in_flight - 1 + len(reserve) + reserve.source_left >= size

    @property
    def short_of_prompts(self) -> bool:
        """Whether the round may soon filter more groups than the reserve can replace."""
        reserve = self._state.reserve
        filters = self.group_filter is not None and reserve.source_open
        return self.is_open and filters and len(reserve) < self.admission.batch_groups

    @property
    def exhausted(self) -> bool:
        """Whether the data has ended with fewer prompts left than a batch needs, so that no further round can complete.

        This only happens with dynamic sampling, which consumes more prompts than it trains.
        """
        state = self._state
        ended = self.group_filter is not None and not state.reserve.source_open
        return ended and state.groups.in_flight + len(state.reserve) < self.admission.batch_groups
