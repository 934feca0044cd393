"""Engine calls in little memory: what a reader keeps of a trace, and what a thinned trace keeps of a round."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, overload

import numpy as np

from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.records.fields import Fields, RunRecordError
from recipe.partial_rollout.records.time_spans import Span, union

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
}
"""type code of each number; -1 is an unknown context"""


class CallColumns(Sequence[EngineCall]):
    """Calls held as columns: about 60 bytes a call where objects take 500. Each call is made when it is asked for.

    >>> calls = CallColumns([EngineCall(0, 1.0, 2.0, 7, 3, sample="0/4#1")])
    >>> calls[0], calls.column("tokens")
    (EngineCall(replica=0, start=1.0, end=2.0, tokens=7, version=3, resumed_tokens=0, context_tokens=None, queued_s=0.0, \
sample='0/4#1', interrupted=False), array([7], dtype=int32))
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

    def column(self, name: str) -> np.ndarray:
        """[call] one of the numbers, by ``EngineCall``'s name; -1: unknown context."""
        return np.array(self._columns[name])

    @property
    def busy_from(self) -> np.ndarray:
        """[call] ``EngineCall.busy_from``"""
        return np.minimum(self.column("start") + self.column("queued_s"), self.column("end"))

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
class CallTotals:
    """The calls of a round in a few numbers."""

    calls: int
    tokens: int
    latest_version: int
    """of a call; -1 without one that says"""
    slot_s: float
    """seconds that slots were busy, with no more counted at once than a full batch has"""
    busy_s: list[float]
    """[replica] sum of the calls' seconds"""
    spans: list[list[Span]]
    """[replica] when it had a call, in unix seconds"""

    @classmethod
    def of(cls, calls: Iterable[EngineCall], replicas: int, slot_s: float) -> Self:
        """The totals of ``calls``, whose replicas are indices below ``replicas``."""
        calls = tuple(calls)
        spans = [[(call.busy_from, call.end) for call in calls if call.replica == i] for i in range(replicas)]
        return cls(
            calls=len(calls),
            tokens=sum(call.tokens for call in calls),
            latest_version=max((call.version for call in calls), default=-1),
            slot_s=slot_s,
            busy_s=[sum(end - start for start, end in of_replica) for of_replica in spans],
            spans=[union(of_replica) for of_replica in spans],
        )

    def to_json(self) -> dict[str, Any]:
        """Its place in the round's line."""
        return asdict(self)

    @classmethod
    def from_json(cls, line: Fields, replicas: int | None) -> Self:
        """The inverse of ``to_json``.

        Raises:
            RunRecordError: a field is missing or of another type, or there are not ``replicas`` of them (None: any).
        """
        match line.items("busy_s"), line.items("spans"):
            case [busy, spans] if len(busy) == len(spans) and replicas in (None, len(busy)):
                by_replica = [Fields(line.place, {"spans": of_replica}) for of_replica in spans]
                return cls(
                    calls=line.integer("calls"),
                    tokens=line.integer("tokens"),
                    latest_version=line.integer("latest_version", least=-1),
                    slot_s=line.number("slot_s"),
                    busy_s=[Fields(line.place, {"busy_s": seconds}).number("busy_s") for seconds in busy],
                    spans=[of_replica.optional_spans("spans") for of_replica in by_replica],
                )
        raise RunRecordError(f"{line.place}: 'busy_s' and 'spans' should have an entry for each of {replicas} replicas")
