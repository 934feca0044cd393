"""What the engines and the trainer of a run did at each moment: its two lanes.

    engines |==decoding=====================|held|==decoding=======...      else idle
    trainer |waiting| training | staging    |load| waiting | training ...   else the driver's own work

Each is in one state at a time. Where phases of the trace overlap, the narrower one counts: staging and loading lie within
the sync, and under separate placement the sync lies within the training phase.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from recipe.partial_rollout.records.run_log import PhaseName
from recipe.partial_rollout.tools.reading.columns import CallColumns, Span, union
from recipe.partial_rollout.tools.run_record import RunRecord


def without(spans: Iterable[Span], *cuts: Iterable[Span]) -> list[Span]:
    """The moments of ``spans`` that lie in none of ``cuts``, by start.

    >>> without([(0, 10)], [(2, 3)], [(8, 12)])
    [(0, 2), (3, 8)]
    """
    left: list[Span] = []
    gone = union(span for cut in cuts for span in cut)
    at = 0
    for start, end in union(spans):
        while at < len(gone) and gone[at][1] <= start:
            at += 1
        for cut_start, cut_end in gone[at:]:
            if cut_start >= end:
                break
            if cut_start > start:
                left.append((start, cut_start))
            start = max(start, cut_end)
        if end > start:
            left.append((start, end))
    return left


def within(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The moments of ``spans`` between ``start`` and ``end``, by start.

    >>> within([(0, 4), (6, 9)], 3, 7)
    [(3, 4), (6, 7)]
    """
    return union((max(a, start), min(b, end)) for a, b in spans if b > start and a < end)


def seconds(spans: Iterable[Span]) -> float:
    """Sum of the spans' lengths."""
    return sum(end - start for start, end in spans)


class Trainer(StrEnum):
    """A state of the trainer, and what a legend calls it."""

    WAIT = "waiting for the batch"
    TRAIN = "log-probs, update"
    STAGE = "staging weights"
    LOAD = "loading weights"
    VALIDATE = "validation"


@dataclass(frozen=True, slots=True)
class Lanes:
    """Unix seconds; spans are by start, those of one lane do not overlap."""

    trainer: dict[Trainer, list[Span]]
    held: list[Span]
    """All engines are held, for new weights or for a checkpoint."""
    decoding: list[list[Span]]
    """[replica] it runs a training sample's call and is not held"""


def lane_shares(run: RunRecord) -> tuple[float | None, float | None, float | None]:
    """Shares of the time from the first batch to the last, 0 to 1; None if the run has one batch only.

    The trainer waits. An engine is idle, in the mean over replicas; one that is held or validates is not. All engines are
    held; None without separate placement.
    """
    start, end = (run.rounds[at].phase.end for at in (0, -1))
    if end <= start:
        return None, None, None
    lanes, span = lanes_of(run), end - start
    waits, held, validates = (
        within(spans, start, end)
        for spans in (lanes.trainer[Trainer.WAIT], lanes.held, lanes.trainer[Trainer.VALIDATE])
    )
    idle = statistics.fmean(seconds(without([(start, end)], spans, held, validates)) for spans in lanes.decoding)
    return seconds(waits) / span, idle / span, seconds(held) / span if run.settings.separate else None


def lanes_of(run: RunRecord) -> Lanes:
    """The lanes of a run of any arm; one without separate placement waits while its engines run a round."""
    spans = {name: union((p.start, p.end) for p in run.phases if p.name == name) for name in PhaseName}
    if not run.settings.separate:
        spans[PhaseName.WAIT] = union((round_.phase.start, round_.phase.end) for round_ in run.rounds)
    held = union([*spans[PhaseName.HOLD], *spans[PhaseName.FLUSH]])
    validate, wait = spans[PhaseName.VALIDATE], spans[PhaseName.WAIT]
    send = union([*spans[PhaseName.SYNC], *spans[PhaseName.STAGE]])
    # Who comes first here takes its moments from those after it.
    trainer = {
        Trainer.VALIDATE: validate,
        Trainer.WAIT: without(wait, validate),
        Trainer.LOAD: without(spans[PhaseName.HOLD], validate, wait),
        Trainer.STAGE: without(send, validate, wait, held),
        Trainer.TRAIN: without(spans[PhaseName.TRAIN], validate, wait, held, send),
    }
    return Lanes(trainer, held, [without(spans, held) for spans in _running(run)])


def _running(run: RunRecord) -> list[list[Span]]:
    """[replica] when it had a call"""
    calls = CallColumns.joined(round_.phase.calls for round_ in run.rounds)
    found: list[list[Span]] = [[] for _ in range(run.settings.replicas)]
    columns = (calls.column(name).tolist() for name in ("replica", "busy_from", "end"))
    for replica, start, end in zip(*columns, strict=True):
        found[replica].append((start, end))
    return [union(spans) for spans in found]
