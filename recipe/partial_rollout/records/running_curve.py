"""Running engine calls at each moment of a rollout phase, and the share of empty slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from recipe.partial_rollout.records.rollout_phase import RolloutPhase


@dataclass(frozen=True, slots=True)
class RunningCurve:
    """A step function of running calls: exactly ``running[:, i]`` from ``times[i]`` to ``times[i + 1]``; it ends at 0."""

    times: np.ndarray
    """[point], unix seconds, ascending; the first and last are the phase's start and end"""
    running: np.ndarray
    """[row, point]"""

    def slot_seconds(self, full: int) -> float:
        """Integral over time of the running calls of all rows, with at most ``full`` counted at once."""
        total = np.minimum(self.running.sum(axis=0), full)
        return float(np.sum(total[:-1] * np.diff(self.times)))


def running_curve(phase: RolloutPhase, rows: Sequence[int] | np.ndarray | None = None, count: int = 1) -> RunningCurve:
    """The curve of the phase's calls while they were busy, cut at the phase's start and end.

    Where a thinned trace lacks the calls, it is flat, at the mean.

    Args:
        rows: for each call, the row (replica) out of ``count`` that it belongs to; None: all in one row.
    """
    if phase.thinned:
        return _mean_curve(phase, by_row=rows is not None)
    calls = len(phase.calls)
    starts, ends = (np.clip(side, phase.start, phase.end) for side in phase.busy)
    owners = np.zeros(calls, dtype=int) if rows is None else np.array(rows, dtype=int)
    times, where = np.unique(np.concatenate([[phase.start, phase.end], starts, ends]), return_inverse=True)
    changes = np.zeros((count, len(times)), dtype=int)
    np.add.at(changes, (owners, where[2 : 2 + calls]), 1)
    np.add.at(changes, (owners, where[2 + calls :]), -1)
    return RunningCurve(times, np.cumsum(changes, axis=1))


def _mean_curve(phase: RolloutPhase, *, by_row: bool) -> RunningCurve:
    assert phase.totals is not None
    busy_s = np.array(phase.totals.busy_s if by_row else [sum(phase.totals.busy_s)])
    mean = busy_s / phase.seconds if phase.seconds else np.zeros(len(busy_s))
    return RunningCurve(np.array([phase.start, phase.end]), np.stack([mean, np.zeros(len(mean))], axis=1))


def slot_seconds(phase: RolloutPhase, full: int) -> float:
    """Seconds that slots were busy in the phase, with at most ``full`` counted at once."""
    return phase.totals.slot_s if phase.totals is not None else running_curve(phase).slot_seconds(full)


def bubble_fraction(phases: Sequence[RolloutPhase], full: int) -> float | None:
    """Mean share of ``full`` slots that were empty during the phases, 0 to 1; None if they took no time."""
    seconds = sum(phase.seconds for phase in phases)
    if seconds <= 0:
        return None
    return 1 - sum(slot_seconds(phase, full) for phase in phases) / (full * seconds)


def bubble_of_ended(phase: RolloutPhase, full: int) -> float | None:
    """As ``bubble_fraction``, of a phase that calls outlast: they are not known yet, so those that ended count whole.

    Close in the mean over many phases, not for one of them (0 to 1); None if it took no time.
    """
    if phase.seconds <= 0:
        return None
    busy = sum(call.end - call.busy_from for call in phase.calls)
    return max(0.0, 1 - busy / (full * phase.seconds))
