"""The two lanes of a run: what its engines and its trainer did at each moment.

    engines |==decoding=====================|held|==decoding=======...      else idle
    trainer |waiting| training | staging    |load| waiting | training ...   else the driver's own work

Each is in one state at a time. Where phases of the trace overlap, the narrower one counts: staging and loading lie within
the sync, and under separate placement the sync lies within the training phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import get_args

import numpy as np

from recipe.partial_rollout.records.run_log import PhaseName
from recipe.partial_rollout.tools.run_record import RunRecord

Bars = list[tuple[float, float]]
"""(start, length) of each bar, in seconds; the start counts from the start of the run"""


class Trainer(StrEnum):
    """A state of the trainer, and what a legend calls it."""

    WAIT = "waiting for the batch"
    TRAIN = "log-probs, update"
    STAGE = "staging weights"
    LOAD = "loading weights"
    VALIDATE = "validation"


@dataclass(frozen=True, slots=True)
class Lanes:
    """States over time: bool [interval] each, an interval between two neighbouring ``moments``."""

    start: float
    """of the run, unix seconds"""
    moments: np.ndarray
    """[moment] unix seconds, ascending, at which a state may change"""
    trainer: dict[Trainer, np.ndarray]
    """Never two at once."""
    held: np.ndarray
    """All engines are held, for new weights or for a checkpoint."""
    decoding: list[np.ndarray]
    """[replica] it runs a training sample's call and is not held"""

    def bars(self, state: np.ndarray) -> Bars:
        """The times that ``state`` lasted."""
        changes = self.moments[np.flatnonzero(np.diff(state, prepend=False, append=False))] - self.start
        return list(zip(changes[::2].tolist(), np.diff(changes)[::2].tolist(), strict=True))


def covered(moments: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return bool [interval]: whether the interval between two neighbouring ``moments`` lies within one of ``spans``.

    Args:
        spans: [span, 2] start and end of each; both must be among ``moments``.

    >>> covered(np.arange(5.0), np.array([(0.0, 1.0), (2.0, 4.0), (3.0, 4.0)])).tolist()
    [True, False, True, True]
    """
    change = np.zeros(len(moments), int)
    np.add.at(change, np.searchsorted(moments, spans[:, 0]), 1)
    np.add.at(change, np.searchsorted(moments, spans[:, 1]), -1)
    return np.cumsum(change)[:-1] > 0


def lane_shares(run: RunRecord) -> tuple[float | None, float | None, float | None]:
    """Return three shares (0 to 1) of the time from the first batch to the last.

    1. The trainer waits for a batch.
    2. A replica is idle: it runs no call, is not held, and no validation runs. Mean over replicas.
    3. All engines are held; None without separate placement.

    All three are None if the run has one batch only.
    """
    start, end = (run.rounds[at].phase.end for at in (0, -1))
    if end <= start:
        return None, None, None
    lanes = lanes_of(run)
    shares = np.diff(np.clip(lanes.moments, start, end)) / (end - start)
    no_idling = lanes.held | lanes.trainer[Trainer.VALIDATE]
    busy = [float(shares @ (decodes | no_idling)) for decodes in lanes.decoding]
    held = float(shares @ lanes.held) if run.settings.separate else None
    return float(shares @ lanes.trainer[Trainer.WAIT]), 1 - float(np.mean(busy)), held


def lanes_of(run: RunRecord) -> Lanes:
    """Compute the lanes of a run. Without separate placement the trainer counts as waiting from a round's start to its
    end."""
    calls = run.calls
    ran, replica = np.stack([calls.column("busy_from"), calls.column("end")], axis=1), calls.column("replica")
    spans = {name: [(p.start, p.end) for p in run.phases if p.name == name] for name in get_args(PhaseName)}
    if not run.settings.separate:
        spans["wait"] = [(round_.phase.start, round_.phase.end) for round_ in run.rounds]
    arrays = {name: np.array(found, float).reshape(-1, 2) for name, found in spans.items()}
    moments = np.unique(np.concatenate([ran, *arrays.values(), [(run.start, run.end)]]))
    during = {name: covered(moments, array) for name, array in arrays.items()}
    held = during["hold"] | during["flush"]
    # An earlier state takes precedence over a later one: the later excludes the intervals of the earlier.
    validate, wait = during["validate"], during["wait"]
    send = during["sync"] | during["stage"]
    trainer = {
        Trainer.VALIDATE: validate,
        Trainer.WAIT: wait & ~validate,
        Trainer.LOAD: during["hold"] & ~validate & ~wait,
        Trainer.STAGE: send & ~validate & ~wait & ~held,
        Trainer.TRAIN: during["train"] & ~validate & ~wait & ~held & ~send,
    }
    decoding = [covered(moments, ran[replica == index]) & ~held for index in range(run.settings.replicas)]
    return Lanes(run.start, moments, trainer, held, decoding)
