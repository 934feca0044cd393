"""``partial_rollout.overlap=auto``: as many spare groups in flight as are worth their staleness, found by measuring.

After each round an engine curve is fitted to the calls of the last rounds, and their lengths are played through the
planner's simulation with one notch more and one notch less in flight. The overlap then moves by at most one notch,
depending on the gain. A change of direction needs two measurements in a row, so that noise does not swing the window.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Thread

import numpy as np

from recipe.partial_rollout.config.choices import ResumeKV
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.engine_curve import Cluster, CurveError, EngineCurve, fit
from recipe.partial_rollout.planner.rounds import forecast, warmup_rounds
from recipe.partial_rollout.planner.samples import LengthTrace
from recipe.partial_rollout.records.calls import EngineCall

logger = logging.getLogger(__name__)

_Round = tuple[list[EngineCall], list[list[int]]]
"""engine calls of a round, and the lengths of each trained group"""
_ROUNDS = 8
"""number of past rounds that a decision uses"""
_GROUPS = 512
"""groups that a simulation trains; with fewer, a few long responses would decide"""


@dataclass(frozen=True, slots=True)
class OverlapDecision:
    """The overlap chosen after a round, and the reasons."""

    overlap: float
    """overlap of the rounds to come"""
    gain_up: float
    """predicted share of speed that one notch more would add; 0 at the ceiling"""
    gain_down: float
    """predicted share of speed that the last notch adds; 0 at no overlap"""
    reason: str


class OverlapControl:
    """Decides between rounds, in a thread of its own, so that no round waits for it.

    Args:
        admission: sizes of the run; the control starts at its overlap.
        notch: most that overlap changes in a round.
        min_gain: share of speed that a notch must add to be worth its staleness.
        cluster: makes the run's engines from the curve of one.
    """

    def __init__(
        self,
        admission: Admission,
        scheduling: Scheduling,
        cluster: Callable[[EngineCurve], Cluster],
        *,
        notch: float = 0.25,
        min_gain: float = 0.03,
    ) -> None:
        self._admission = admission
        self._scheduling = scheduling
        self._cluster = cluster
        # Less than one group would change nothing.
        self._notch = max(notch, 1 / admission.batch_groups)
        self._min_gain = min_gain
        self._rounds: deque[_Round] = deque(maxlen=_ROUNDS)
        self._pending: Future[OverlapDecision | None] | None = None
        self._last: OverlapDecision | None = None
        self._heading = 0.0
        self._turn_asked = False

    @classmethod
    def of(cls, settings: PartialRolloutConfig, replicas: int, slots: Callable[[], int]) -> OverlapControl | None:
        """The control that the settings ask for; ``slots`` returns the slots of a replica. None if ``overlap`` is fixed."""
        if not settings.adapts_overlap:
            return None

        def cluster(curve: EngineCurve) -> Cluster:
            return Cluster(curve, replicas, slots(), settings.resume_kv is ResumeKV.KEEP)

        return cls(Admission.of(settings), settings.scheduling, cluster)

    @property
    def overlap(self) -> float:
        """The overlap in force."""
        return self._admission.overlap

    def metrics(self) -> dict[str, float]:
        """The overlap in force, and the gains that led to the last decision (shares of speed)."""
        figures = {"overlap_auto/target": self.overlap}
        if self._last is not None:
            figures |= {"overlap_auto/gain_up": self._last.gain_up, "overlap_auto/gain_down": self._last.gain_down}
        return figures

    def observe(self, calls: Sequence[EngineCall], lengths: Sequence[Sequence[int]]) -> None:
        """Start to decide after a round, from its engine calls and the lengths of each group that it trains."""
        self._rounds.append((list(calls), [list(group) for group in lengths]))
        if self._pending is None:
            self._pending = Future()
            # A daemon thread, so that the end of the training does not wait for a decision that nobody needs.
            Thread(target=self._answer, args=(self._pending, list(self._rounds)), daemon=True).start()

    def _answer(self, answer: Future[OverlapDecision | None], rounds: Sequence[_Round]) -> None:
        try:
            answer.set_result(self.decide(rounds))
        except Exception as error:
            # The overlap stays as it is: a failed forecast is no reason to end a training.
            logger.exception("overlap=auto decided nothing: %s", error)
            answer.set_result(None)

    def poll(self) -> OverlapDecision | None:
        """A change decided since the last call, which is now in force; None if there is none, or not yet."""
        if self._pending is None or not self._pending.done():
            return None
        decision, self._pending = self._pending.result(), None
        if decision is None:
            return None
        before = self.overlap
        self._last = decision = self._steadied(decision)
        self._admission = replace(self._admission, overlap=decision.overlap)
        return decision if decision.overlap != before else None

    def _steadied(self, decision: OverlapDecision) -> OverlapDecision:
        """The decision, or to stay if it is the first one to change direction."""
        change = float(np.sign(decision.overlap - self.overlap))
        turns = change != 0 and change == -self._heading
        if turns and not self._turn_asked:
            self._turn_asked = True
            return replace(decision, overlap=self.overlap, reason=f"{decision.reason}: once more, and it turns back")
        self._turn_asked = False
        self._heading = change or self._heading
        return decision

    def decide(self, rounds: Sequence[_Round]) -> OverlapDecision | None:
        """The next overlap after these rounds; None if they do not show how the engine's speed depends on its load."""
        try:
            curve = fit([call for calls, _ in rounds for call in calls])
        except CurveError:
            return None
        lengths = LengthTrace(np.maximum(1, np.array([group for _, groups in rounds for group in groups])))
        cluster, now = self._cluster(curve), self.overlap
        more = min(now + self._notch, float(self._admission.max_staleness))
        less = max(now - self._notch, 0.0)
        # All three are simulated over the same rounds, so that two equal ones do not differ by where they are cut.
        warmup = warmup_rounds(more)
        speeds = {overlap: self._speed(overlap, cluster, lengths, warmup) for overlap in {less, now, more}}
        up, down = speeds[more] / speeds[now] - 1, speeds[now] / speeds[less] - 1
        if more > now and up >= self._min_gain:
            return OverlapDecision(more, up, down, f"a notch more gains {up:.1%}, at least {self._min_gain:.1%}")
        # Half of what it takes to go up, so that a gain near the threshold does not swing the window.
        if less < now and down < self._min_gain / 2:
            return OverlapDecision(
                less, up, down, f"the last notch gains {down:.1%}, under half of {self._min_gain:.1%}"
            )
        return OverlapDecision(now, up, down, f"the last notch gains {down:.1%}, a notch more {up:.1%}")

    def _speed(self, overlap: float, cluster: Cluster, lengths: LengthTrace, warmup: int) -> float:
        admission = replace(self._admission, overlap=overlap)
        rounds = min(32, max(8, _GROUPS // admission.batch_groups))
        made = forecast(admission, self._scheduling, cluster, lengths, rounds=rounds, warmup=warmup)
        return made.trained_tokens_per_s
