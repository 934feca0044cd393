"""Engine calls and trained groups of a trace, held as columns."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Self, overload

import numpy as np

from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.records.trained_group import TrainedGroup

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
        if name == "busy_from":
            return np.minimum(self.column("start") + self.column("queued_s"), self.column("end"))
        return np.array(self._columns[name])

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


class GroupColumns(Sequence[TrainedGroup]):
    """Groups of a trace, held as columns: 12 bytes a sample, 100 a group, where objects take 900.

    >>> groups = GroupColumns([TrainedGroup(4, 0, [70, 80], [0, 1], segments=[1, 2], tokens=150)])
    >>> groups[0].order, groups[0].lengths
    (4, [70, 80])
    """

    __slots__ = ("_ends", "_of_group", "_of_sample", "_prompts")

    def __init__(self, groups: Iterable[TrainedGroup] = ()) -> None:
        self._of_group = {name: array("q") for name in ("order", "epoch", "tokens", "off_policy_tokens")}
        self._of_sample = {name: array("i") for name in ("lengths", "staleness", "segments")}
        self._ends = array("q", [0])
        """of each group's samples; a 0 stands before them"""
        self._prompts: list[str] = []
        self.extend(groups)

    def extend(self, groups: Iterable[TrainedGroup]) -> None:
        """Add groups; of each, the fields that a trace has."""
        for group in groups:
            for name, column in self._of_group.items():
                column.append(getattr(group, name))
            for name, column in self._of_sample.items():
                column.extend(getattr(group, name))
            self._ends.append(len(self._of_sample["lengths"]))
            self._prompts.append(sys.intern(group.prompt))

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, at: int) -> TrainedGroup: ...
    @overload
    def __getitem__(self, at: slice) -> list[TrainedGroup]: ...
    def __getitem__(self, at: int | slice) -> TrainedGroup | list[TrainedGroup]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        first, last = self._ends[at % len(self)], self._ends[at % len(self) + 1]
        order, epoch, tokens, off_policy_tokens = (column[at] for column in self._of_group.values())
        lengths, staleness, segments = (column[first:last].tolist() for column in self._of_sample.values())
        return TrainedGroup(order, epoch, lengths, staleness, self._prompts[at], segments, tokens, off_policy_tokens)
