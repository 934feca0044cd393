"""The state of partial rollout: which prompts are in flight, and the state of each of their samples.

A pure state machine, driven by verbs: no Ray, no asyncio, no torch, no clock of its own. It guarantees that

* every prompt offered is consumed exactly once: its group is acknowledged as trained, or FILTERED when its last sample
  ends;
* no group is trained later than ``max_staleness`` versions after its first sample started: ``round_complete`` stays False
  while stopping would leave more groups than the next rounds can train in time;
* a sample has one owner: it is claimable, or one worker has it (RUNNING, AWAY), or it awaits its retry, or it has ended.

These guarantees hold across ``state_dict`` and ``load_state_dict``. ``PromptsManager`` passes each verb to the owner of
the state that it changes: ``Reserve`` (prompts that wait), ``Groups``, ``Samples``, ``Slots`` (workers and their claims),
``Round``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager import report as manager_report
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.codec import Captured, capture, decode, encode
from recipe.partial_rollout.manager.failure_policy import FailurePolicy, FailureVerdict
from recipe.partial_rollout.manager.group_filter import GroupFilter
from recipe.partial_rollout.manager.groups import Counters, Put
from recipe.partial_rollout.manager.messages import Standing
from recipe.partial_rollout.manager.round import Round
from recipe.partial_rollout.manager.samples import Samples
from recipe.partial_rollout.manager.slots import Slots
from recipe.partial_rollout.manager.state import ManagerState
from recipe.partial_rollout.manager.types import FilteredGroup, FinishedOutput, Grant, Prompt, Segment, TakenGroup


class PromptsManager:
    """Owner of all prompts between the data source and the trainer.

    A batch of one group of two samples, one spare group in flight, three slots. At the end of the first round::

        reserve        in flight                                trainer
        0/2     ---->  0/1#0 interrupted, 0/1#1 waiting  ---->  0/0

    >>> import numpy as np
    >>> from recipe.partial_rollout.config.choices import Mode
    >>> from recipe.partial_rollout.manager.types import SampleOutput
    >>> admission = Admission(Mode.WINDOW, 1, 2, 1.0, 2, 2, max_staleness=4)
    >>> manager = PromptsManager(admission, Scheduling(), clock=lambda: 0.0)
    >>> manager.offer(Prompt(f"0/{i}", 0, {}) for i in range(3))
    >>> manager.register_worker("w0", capacity=3)
    >>> manager.open_round(), [grant.sample_id for grant in manager.claim("w0")]
    (2, ['0/0#0', '0/0#1', '0/1#0'])
    >>> token = np.ones(1, np.int32)
    >>> output = SampleOutput(token, token, token, -token, 0 * token, 1, 1.0, {}, 2, {})
    >>> for sample_id in ("0/0#0", "0/0#1"):
    ...     manager.finish(sample_id, output)
    >>> manager.round_complete(), manager.close_round()
    (True, ('0/0', '0/1'))
    >>> manager.interrupt("0/1#0")
    >>> [group.uid for group in manager.take_batch()]
    ['0/0']

    Args:
        admission: mode and sizes.
        scheduling: order in which samples are claimed, and how far a group may overtake an older one.
        clock: seconds; stamped on state changes for stall reports.
        failures: what to do with a sample whose agent loop raised.
        group_filter: which finished groups are replaced; None: none.
    """

    def __init__(
        self,
        admission: Admission,
        scheduling: Scheduling,
        clock: Callable[[], float],
        failures: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
        group_filter: GroupFilter | None = None,
    ) -> None:
        self._clock = clock
        self._state = ManagerState()
        self._slots = Slots(scheduling.policy)
        self._samples = Samples(self._state.groups, self._slots, failures, clock)
        self._round = Round(self._state, self._samples, admission, scheduling, group_filter)

    @property
    def version(self) -> int:
        """Policy version that decodes the claimed samples."""
        return self._state.version

    @property
    def counters(self) -> Counters:
        """Totals since the start of the run."""
        return self._state.groups.counters

    # -- workers ---------------------------------------------------------------------------------------------------

    def register_worker(self, worker: str, capacity: int) -> None:
        """Declare a worker that can run ``capacity`` samples at once."""
        self._slots.register(worker, capacity)

    def resize_worker(self, worker: str, capacity: int) -> None:
        """From here on ``worker`` can run ``capacity`` samples at once; running samples are not stopped."""
        self._slots.resize(worker, capacity)

    def release_worker(self, worker: str) -> int:
        """Forget a dead worker and requeue its samples with their journals; returns how many."""
        return self._samples.release(worker)

    @property
    def workers(self) -> Iterable[str]:
        """Workers that have joined and were not released."""
        return self._slots.workers

    def incarnation(self, worker: str) -> object:
        """See ``Slots.incarnation``: distinguishes a call by a dead worker from one by its successor of the same name."""
        return self._slots.incarnation(worker)

    # -- samples ---------------------------------------------------------------------------------------------------

    def claim(self, worker: str, limit: int | None = None, *, beyond_share: bool = False) -> list[Grant]:
        """Run up to ``limit`` samples (default: all its free slots) on ``worker``, by priority; see ``Slots.claim``."""
        self.incarnation(worker)
        if not self.round_open:
            return []
        version, overdue = self.version, self._round.overdue
        return self._samples.claim(worker, limit, version=version, overdue=overdue, beyond_share=beyond_share)

    def held_back(self, worker: str) -> bool:
        """Whether ``worker`` has free slots but got no more samples because it already has its share."""
        return self.round_open and self._slots.held_back(worker)

    def add_segment(self, sample_id: str, segment: Segment) -> None:
        """Cache tokens of a running sample, so that they survive its worker."""
        self._samples.add_segment(sample_id, segment)

    def add_tool_result(self, sample_id: str, result: dict[str, Any]) -> None:
        """Cache the JSON-able result of a running sample's finished tool call, so that the call is not made again."""
        self._samples.add_tool_result(sample_id, result)

    def interrupt(self, sample_id: str) -> None:
        """RUNNING -> INTERRUPTED: frees the slot; the worker keeps the conversation until the sample is granted again."""
        self._samples.interrupt(sample_id)

    def leave(self, sample_id: str) -> None:
        """RUNNING -> AWAY: frees the slot; its worker awaits its reward or a tool."""
        self._samples.leave(sample_id)

    def come_back(self, sample_id: str) -> None:
        """AWAY -> INTERRUPTED: its worker claims it before any other sample."""
        self._samples.come_back(sample_id)

    def finish(self, sample_id: str, output: FinishedOutput) -> None:
        """RUNNING, AWAY -> FINISHED with its output; if it was the last of its group, see ``Round.sample_ended``."""
        self._round.sample_ended(self._samples.finish(sample_id, output))

    def fail(self, sample_id: str, error: str) -> FailureVerdict:
        """RUNNING, AWAY -> FAILED: its agent loop raised ``error`` (one line); returns the verdict.

        RETRY: call ``retry`` after ``retry_delay_s``. MASK: the sample is FINISHED, masked. RAISE: the run must end.
        """
        verdict = self._samples.fail(sample_id, error)
        if verdict is FailureVerdict.MASK:
            self._round.sample_ended(self._samples.mask(sample_id))
        return verdict

    def retry_delay_s(self, sample_id: str) -> float:
        """Seconds that a failed sample waits for its ``retry``."""
        return self._samples.retry_delay_s(sample_id)

    def retry(self, sample_id: str) -> None:
        """FAILED -> INTERRUPTED with its journal (WAITING without one); any worker may claim it."""
        self._samples.retry(sample_id)

    # -- prompts, rounds and batches -------------------------------------------------------------------------------

    def offer(self, prompts: Iterable[Prompt]) -> None:
        """Put prompts in reserve, in training order; they start when admission allows."""
        self._state.reserve.offer(prompts)

    def note_source(self, left: int) -> None:
        """Note that the source has ``left`` more prompts to offer; if none, it is closed."""
        self._state.reserve.note_source(left)

    def close_source(self) -> None:
        """No more prompts will be offered: what is in flight drains."""
        self._state.reserve.close_source()

    @property
    def wanted(self) -> int:
        """See ``Round.wanted``."""
        return self._round.wanted

    @property
    def short_of_prompts(self) -> bool:
        """See ``Round.short_of_prompts``."""
        return self._round.short_of_prompts

    @property
    def exhausted(self) -> bool:
        """See ``Round.exhausted``."""
        return self._round.exhausted

    def admit(self, *, round_start: bool = False) -> int:
        """Move prompts from the reserve into flight as far as the mode allows; returns how many."""
        return self._round.admit(round_start=round_start)

    def set_overlap(self, overlap: float) -> None:
        """See ``Round.set_overlap``; what is in flight already stays."""
        self._round.set_overlap(overlap)

    def advance_version(self, version: int) -> None:
        """See ``ManagerState.advance``."""
        self._state.advance(version)

    @property
    def round_open(self) -> bool:
        """Whether workers may claim."""
        return self._round.is_open

    def open_round(self) -> int:
        """Admit what the mode starts a round with, and let workers claim; returns the groups admitted."""
        return self._round.open()

    def close_round(self) -> tuple[str, ...]:
        """Stop claims: running samples are about to be interrupted; returns the uids admitted since the last batch."""
        self._round.close()
        return tuple(self._state.groups.admitted)

    def round_complete(self) -> bool:
        """See ``Round.complete``."""
        return self._round.complete()

    def begin_version(self, version: int) -> int:
        """See ``Round.begin_version``."""
        return self._round.begin_version(version)

    def complete_batch(self, *, stop: bool) -> tuple[list[TakenGroup[FinishedOutput]], tuple[str, ...]]:
        """READY -> TAKEN: see ``Round.take_batch``; returns the groups, and the uids admitted since the last batch.

        A checkpoint keeps these uids until the batch is acknowledged.
        """
        groups = self._state.groups
        return groups.take(self._round.take_batch(stop=stop)), groups.tell_admitted()

    def take_batch(self) -> list[TakenGroup[FinishedOutput]]:
        """READY -> TAKEN: the N oldest ready groups; see ``Round.batch``. ``close_round`` has told the uids admitted."""
        taken = self._state.groups.take(self._round.batch())
        self.take_admitted()
        return taken

    def next_batch(self) -> list[TakenGroup[FinishedOutput]]:
        """Separate placement: ``take_batch``, while all other samples run on; see ``Round.next_batch``."""
        return self._state.groups.take(self._round.next_batch())

    def require_open(self, verb: str) -> None:
        """See ``Round.require_open``."""
        self._round.require_open(verb)

    def next_version(self, version: int, prompts: Iterable[Prompt]) -> int:
        """Separate placement: all engines hold ``version``; opens the one round the first time; ``Round.next_version``."""
        return self._round.next_version(version, prompts)

    def acknowledge(self, uids: Iterable[str]) -> None:
        """TAKEN -> TRAINED: the trainer has updated on these groups, and they are forgotten."""
        self._state.groups.train(uids)

    def take_admitted(self) -> tuple[str, ...]:
        """Separate placement: the uids admitted since this was last asked, for the ledger."""
        return self._state.groups.take_admitted()

    def take_filtered(self) -> tuple[FilteredGroup, ...]:
        """The groups filtered since this was last asked, for the ledger."""
        return self._state.groups.take_filtered()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def capture(self) -> Captured:
        """The state at this moment, cheap to take; ``codec.encode`` can make the ``state_dict`` of it later."""
        return capture(self._state, self._round.admission)

    def state_dict(self) -> dict[str, Any]:
        """All but the workers, in plain Python and numpy; layout in ``codec``."""
        return encode(self.capture())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``: unfinished samples are claimable, groups that were with the trainer are ready again.

        Raises:
            ValueError: it was made with another batch or group size, or a larger ``max_staleness`` than this run allows.
            RuntimeError: this manager already has prompts.
        """
        if self._state.reserve or self.counters.admitted_groups:
            raise RuntimeError("load_state_dict: the manager has prompts already; load before the first offer")
        decode(state, self._round.admission, self._state)
        for group in self._state.groups.by_order.values():
            self._samples.enter(group)

    def store_outputs(self, put: Put) -> None:
        """Move the outputs restored from a checkpoint into a store with ``put``, a group at a time."""
        self._state.groups.store_outputs(put)

    # -- observation -----------------------------------------------------------------------------------------------

    @property
    def lost_groups(self) -> int:
        """Number of admitted groups that are missing, though neither trained nor filtered: always 0."""
        return self._state.groups.lost

    @property
    def cached_tokens(self) -> int:
        """Response tokens of all samples in flight or with the trainer."""
        return self._state.groups.cached_tokens

    @property
    def carried_groups(self) -> int:
        """Number of groups in flight that have started."""
        return self._state.groups.carried

    def metrics(self) -> dict[str, float]:
        """See ``report.gauges``; with dynamic sampling those of ``report.filter_gauges`` too."""
        gauges = manager_report.gauges(self._state, len(self._samples), self._round.admission.samples_per_group)
        return gauges | (manager_report.filter_gauges(self.counters) if self._round.group_filter is not None else {})

    def standing(self) -> Standing:
        """See ``report.standing``."""
        return manager_report.standing(self._state, self._slots.running)

    def unfinished_report(self, limit: int = 8) -> str:
        """See ``report.unfinished_report``."""
        return manager_report.unfinished_report(self._samples.unfinished.values(), self._clock(), limit)
