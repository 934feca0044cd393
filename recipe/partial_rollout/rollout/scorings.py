"""Reward calls of trained samples: when each was made, and how much of them held nobody up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from recipe.partial_rollout.manager.types import SCORING_BEGAN, SCORING_ENDED, TakenGroup
from recipe.partial_rollout.records.rollout_phase import RolloutPhase
from recipe.partial_rollout.records.time_spans import Span, common, overlap_s, seconds, without

_REMEMBERED = 64
"""rounds; a sample that was scored before them is taken to have held nobody up"""


def scorings_of(groups: Iterable[TakenGroup]) -> tuple[Span, ...]:
    """Start and end (unix seconds) of the reward calls of the groups' samples; one without a reward call has none."""
    metrics = [output.metrics for group in groups for output in group.outputs]
    return tuple((found[SCORING_BEGAN], found[SCORING_ENDED]) for found in metrics if SCORING_BEGAN in found)


class Scorings:
    """Tells how much of the reward calls ran while an engine decoded or the trainer trained."""

    def __init__(self) -> None:
        self._blocked: deque[list[Span]] = deque(maxlen=_REMEMBERED)
        """of each round: when the trainer waited and no engine ran a sample"""

    def observe(self, phase: RolloutPhase, scorings: Sequence[Span], waited_s: float | None = None) -> dict[str, float]:
        """Metrics of a trained batch: seconds of its reward calls, the share of these that overlapped, and the seconds in
        which nothing else went on; none without a reward call.

        Args:
            phase: of its round.
            waited_s: for how long the trainer waited at the end of it; None: all the time.
        """
        start = phase.start if waited_s is None else phase.end - waited_s
        self._blocked.append(without([(start, phase.end)], [(call.busy_from, call.end) for call in phase.calls]))
        total = seconds(scorings)
        if not total:
            return {}
        blocked = [span for spans in self._blocked for span in spans]
        return {
            "rollout/scoring_s": total,
            "rollout/scoring_overlap": 1 - overlap_s(scorings, blocked) / total,
            "rollout/scoring_alone_s": seconds(common(scorings, blocked)),
        }
