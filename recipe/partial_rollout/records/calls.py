"""Engine calls, and the rollout phases that they ran in."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Self, overload

import numpy as np

from recipe.partial_rollout.records.jsonl import RunRecordError

Span = tuple[float, float]
"""start and end, in seconds"""


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments in as few spans as possible, by start; empty ones are left out.

    >>> union([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request to a replica, as its client saw it.

    >>> call = EngineCall("10.0.0.1:8000", start=0.0, end=10.0, tokens=40, version=3, queued_s=2.0)
    >>> call.busy_from, call.tokens_within(0.0, 6.0)
    (2.0, 20.0)
    """

    replica: str | int
    """the load balancer's server id; in a trace, the replica's index"""
    start: float
    """unix seconds"""
    end: float
    tokens: int
    """decoded by this call"""
    version: int
    """policy version that the replica held; -1 if it did not say"""
    resumed_tokens: int = 0
    """tokens that it prefilled again after an interruption, or after a tool; those still cached do not count"""
    context_tokens: int | None = None
    """prompt and response tokens that it started from; None if not noted"""
    queued_s: float = 0.0
    """seconds that it waited in the engine before it was first scheduled; 0 if the replica does not say"""
    sample: str = ""
    """the sample: ``epoch/position#index`` under PR, verl's request id under noPR; "" if not noted"""
    interrupted: bool = False
    """whether the engine aborted it, so that the sample resumes with another call"""
    earlier_tokens: int = 0
    """of ``context_tokens``, those of the conversation's earlier turns, if it begins a turn: what it reads again"""
    waited_s: float = 0.0
    """seconds before ``start`` that its sample waited for a slot in an open round; 0 if not noted, and under noPR"""

    @property
    def busy_from(self) -> float:
        """When it began to run in its engine (unix seconds); while it queues it makes no token and its slot is empty."""
        return min(self.start + self.queued_s, self.end)

    def tokens_within(self, start: float, end: float) -> float:
        """Tokens made between ``start`` and ``end`` (unix seconds), assuming that it made them evenly once it ran."""
        inside = min(self.end, end) - max(self.busy_from, start)
        return self.tokens * max(0.0, inside) / (self.end - self.busy_from) if self.end > self.busy_from else 0.0

    def to_json(self) -> list[Any]:
        """A row of the trace: the fields in their order."""
        return list(_in_order(self))

    @classmethod
    def from_json(cls, values: object, place: str, replicas: int | None) -> Self:
        """The inverse of ``to_json``.

        Args:
            place: of the row, for the error. replicas: number of the run's replicas; None if any index is valid.

        Raises:
            RunRecordError: ``values`` is not such a row, or names a replica that the run does not have.
        """
        match values:
            case [
                int(replica),
                int() | float() as start,
                int() | float() as end,
                int(tokens),
                int(version),
                int(resumed),
                int() | None as context,
                int() | float() as queued_s,
                str(sample),
                bool(interrupted),
                int(earlier),
                int() | float() as waited_s,
            ]:
                if replica < 0 or (replicas is not None and replica >= replicas):
                    raise RunRecordError(
                        f"{place}: a call names replica {replica}, but run.json says {replicas} replicas"
                    )
                if end < start:
                    raise RunRecordError(f"{place}: a call ends ({end}) before it starts ({start})")
                spent = float(start), float(end), tokens, version, resumed, context, queued_s
                return cls(replica, *spent, sample, interrupted, earlier, waited_s)
        raise RunRecordError(
            f"{place}: a call should be [replica, start, end, tokens, version, resumed tokens, context tokens, "
            f"queued seconds, sample, interrupted, earlier tokens, waited seconds], got {values!r:.60}"
        )


_in_order = attrgetter(*(each.name for each in fields(EngineCall)))

_KINDS = {
    "replica": "i",
    "start": "d",
    "end": "d",
    "tokens": "i",
    "version": "i",
    "resumed_tokens": "i",
    "context_tokens": "i",
    "queued_s": "d",
    "interrupted": "b",
    "earlier_tokens": "i",
    "waited_s": "d",
}
"""type code of each number; -1 is an unknown context"""


class CallColumns(Sequence[EngineCall]):
    """Calls held as columns: about 70 bytes a call where objects take 500. Each call is made when it is asked for.

    >>> calls = CallColumns([EngineCall(0, 1.0, 2.0, 7, 3, sample="0/4#1")])
    >>> calls[0], calls.column("tokens")
    (EngineCall(replica=0, start=1.0, end=2.0, tokens=7, version=3, resumed_tokens=0, context_tokens=None, queued_s=0.0, \
sample='0/4#1', interrupted=False, earlier_tokens=0, waited_s=0.0), array([7], dtype=int32))
    """

    __slots__ = ("_columns", "samples")

    def __init__(self, calls: Iterable[EngineCall] = ()) -> None:
        self._columns = {name: array(kind) for name, kind in _KINDS.items()}
        self.samples: list[str] = []
        """[call] name of its sample, one object for all calls of a sample"""
        for call in calls:
            self.append(call)

    def append(self, call: EngineCall) -> None:
        """Add a call; its replica is an index."""
        for name, column in self._columns.items():
            value = getattr(call, name)
            column.append(-1 if value is None else value)
        self.samples.append(sys.intern(call.sample))

    @classmethod
    def joined(cls, parts: Iterable[Sequence[EngineCall]]) -> Self:
        """The calls of ``parts``, one after another."""
        made = cls()
        for part in parts:
            columns = part if isinstance(part, CallColumns) else cls(part)
            for name, column in made._columns.items():
                column.extend(columns._columns[name])
            made.samples.extend(columns.samples)
        return made

    def column(self, name: str) -> np.ndarray:
        """[call] one of the numbers, by ``EngineCall``'s name; -1: unknown context."""
        return np.array(self._columns[name])

    @property
    def busy_from(self) -> np.ndarray:
        """[call] ``EngineCall.busy_from``"""
        return np.minimum(self.column("start") + self.column("queued_s"), self.column("end"))

    def between_turns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[gap] the call that ended a turn; start and end (unix seconds) of what followed in tools and agent loop.

        A gap ends where the sample's next call asks for a slot. None follows a call whose sample is not noted.

        >>> turns = EngineCall(0, 1.0, 2.0, 7, 3, sample="a"), EngineCall(0, 9.0, 9.5, 7, 4, sample="a", waited_s=4.0)
        >>> [each.tolist() for each in CallColumns(turns).between_turns()]
        [[0], [2.0], [5.0]]
        """
        names: dict[str, int] = {"": -1}
        sample = np.fromiter((names.setdefault(name, len(names)) for name in self.samples), np.int64, len(self))
        asked, end = self.column("start") - self.column("waited_s"), self.column("end")
        order = np.lexsort((asked, sample))
        left, back = order[:-1], order[1:]
        gap = (sample[left] == sample[back]) & (sample[left] >= 0) & (asked[back] > end[left])
        left, back = (each[gap & (self.column("interrupted")[left] == 0)] for each in (left, back))
        return left, end[left], asked[back]

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, at: int) -> EngineCall: ...
    @overload
    def __getitem__(self, at: slice) -> list[EngineCall]: ...
    def __getitem__(self, at: int | slice) -> EngineCall | list[EngineCall]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        values = {name: column[at] for name, column in self._columns.items()}
        context, interrupted = values.pop("context_tokens"), bool(values.pop("interrupted"))
        known = None if context < 0 else context
        return EngineCall(**values, context_tokens=known, sample=self.samples[at], interrupted=interrupted)


@dataclass(frozen=True, slots=True)
class RolloutPhase:
    """A time span from the start of a round until every replica is quiet, and its engine calls."""

    start: float
    """unix seconds"""
    end: float
    calls: Sequence[EngineCall] = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def decoded_tokens(self) -> int:
        if isinstance(self.calls, CallColumns):
            return int(self.calls.column("tokens").sum())
        return sum(call.tokens for call in self.calls)

    @property
    def busy(self) -> tuple[np.ndarray, np.ndarray]:
        """[call] when each began to run in its engine, and when it ended"""
        if isinstance(self.calls, CallColumns):
            return self.calls.busy_from, self.calls.column("end")
        return np.array([call.busy_from for call in self.calls]), np.array([call.end for call in self.calls])

    @property
    def replicas(self) -> np.ndarray:
        """[call] index of its replica"""
        if isinstance(self.calls, CallColumns):
            return self.calls.column("replica")
        return np.array([call.replica for call in self.calls], dtype=int)
