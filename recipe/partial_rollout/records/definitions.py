"""Figures that dashboard (``metrics``), report and planner all show: each has its one definition here.

Times are unix seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class CallSpan(Protocol):
    """When an engine call was under way."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def queued_s(self) -> float:
        """seconds after its start for which it waited in the engine, without a seat or KV blocks"""
        ...


class PhaseSpan(Protocol):
    """A rollout phase with its engine calls."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def calls(self) -> Sequence[CallSpan]: ...


def busy_from(call: CallSpan) -> float:
    """When a call took a slot of its engine: while it queues it makes no token, and its slot stands empty."""
    return min(call.start + call.queued_s, call.end)


@dataclass(frozen=True, slots=True)
class RunningCurve:
    """How many calls ran at each moment: ``running[:, i]`` from ``times[i]`` to ``times[i + 1]``, exactly; it ends at 0."""

    times: np.ndarray
    """[point], ascending; the first and last are the phase's start and end"""
    running: np.ndarray
    """[row, point]"""

    def slot_seconds(self, full: int) -> float:
        """Integral over time of the running calls of all rows, counted up to ``full``."""
        total = np.minimum(self.running.sum(axis=0), full)
        return float(np.sum(total[:-1] * np.diff(self.times)))


def running_curve(phase: PhaseSpan, rows: Sequence[int] | None = None, count: int = 1) -> RunningCurve:
    """The busy time of the phase's calls, cut at its start and end.

    Args:
        rows: for each call, which of ``count`` rows (replicas) it counts in; None: all in one.
    """
    starts = np.clip([busy_from(call) for call in phase.calls], phase.start, phase.end)
    ends = np.clip([call.end for call in phase.calls], phase.start, phase.end)
    owners = np.zeros(len(phase.calls), dtype=int) if rows is None else np.array(rows, dtype=int)
    times, where = np.unique(np.concatenate([[phase.start, phase.end], starts, ends]), return_inverse=True)
    changes = np.zeros((count, len(times)), dtype=int)
    calls = len(phase.calls)
    np.add.at(changes, (owners, where[2 : 2 + calls]), 1)
    np.add.at(changes, (owners, where[2 + calls :]), -1)
    return RunningCurve(times, np.cumsum(changes, axis=1))


def bubble_fraction(phases: Sequence[PhaseSpan], full: int) -> float | None:
    """Share of ``full`` slots that stood empty over the time of the phases, 0 to 1; None where they took no time."""
    seconds = sum(phase.end - phase.start for phase in phases)
    if seconds <= 0:
        return None
    return 1 - sum(running_curve(phase).slot_seconds(full) for phase in phases) / (full * seconds)


def p95(values: Sequence[float] | np.ndarray) -> float:
    """The least of ``values`` that 95% of them do not pass: one that occurs, as counts (versions, segments) want."""
    return float(np.percentile(values, 95, method="inverted_cdf"))


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a figure over samples or rounds."""

    mean: float
    p95: float
    max: float


def spread(values: Sequence[float] | np.ndarray) -> Spread | None:
    """None without values."""
    if not len(values):
        return None
    return Spread(float(np.mean(values)), p95(values), float(np.max(values)))
