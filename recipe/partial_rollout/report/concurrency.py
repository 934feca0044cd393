"""How many samples ran at each moment, exactly: every start and end of a call is a point of the curve."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .records import Round


@dataclass(frozen=True, slots=True)
class RunningCurve:
    """A step function: `running[:, i]` holds from `times[i]` to `times[i + 1]`; it ends at 0."""

    times: np.ndarray
    """[point], ascending; the first and last are the round's start and end."""
    running: np.ndarray
    """[replica, point]"""

    def slot_seconds(self, full: int) -> float:
        """Integral over time of the running samples, counted up to `full`."""
        total = np.minimum(self.running.sum(axis=0), full)
        return float(np.sum(total[:-1] * np.diff(self.times)))


def running_curve(round_: Round, replicas: int) -> RunningCurve:
    """Calls are cut at the round's start and end."""
    starts = np.clip([call.start for call in round_.calls], round_.start, round_.end)
    ends = np.clip([call.end for call in round_.calls], round_.start, round_.end)
    owners = np.array([call.replica for call in round_.calls], dtype=int)
    times, where = np.unique(np.concatenate([[round_.start, round_.end], starts, ends]), return_inverse=True)
    changes = np.zeros((replicas, len(times)), dtype=int)
    count = len(round_.calls)
    np.add.at(changes, (owners, where[2 : 2 + count]), 1)
    np.add.at(changes, (owners, where[2 + count :]), -1)
    return RunningCurve(times, np.cumsum(changes, axis=1))


def bubble_fraction(rounds: Sequence[Round], full: int, replicas: int) -> float | None:
    """Share of the full slots that stood empty, averaged over the time of the rounds."""
    seconds = sum(round_.end - round_.start for round_ in rounds)
    if seconds == 0:
        return None
    used = sum(running_curve(round_, replicas).slot_seconds(full) for round_ in rounds)
    return 1 - used / (full * seconds)
