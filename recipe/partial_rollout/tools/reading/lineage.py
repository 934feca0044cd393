"""Which records of a run count: those of the processes that lead to its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Life(Generic[T]):
    """One process of the run."""

    parent: _Life[T] | None = None
    """the process whose checkpoint it continues"""
    step: int = 0
    """of that checkpoint"""
    records: list[tuple[int, T]] = field(default_factory=list)


class Lineage(Generic[T]):
    """The records of a run by process and step. Those count that lead to its end, from checkpoint to checkpoint.

    >>> lineage = Lineage()
    >>> for step in (1, 2, 3):
    ...     lineage.add(step, f"{step}, first life")
    >>> lineage.resume(1)
    >>> lineage.add(2, "2, second life")
    >>> lineage.resume(3)
    >>> list(lineage.standing())
    ['1, first life', '2, first life', '3, first life']
    """

    def __init__(self) -> None:
        self._lives: list[_Life[T]] = [_Life()]
        self._saved: dict[int, _Life[T]] = {}
        """by step: the process that saved its checkpoint last"""

    def add(self, step: int, record: T) -> None:
        """Add a record of ``step``, by the process that began last."""
        self._lives[-1].records.append((step, record))

    def checkpoint(self, step: int) -> None:
        """Note that the process which began last has saved the checkpoint of ``step``."""
        self._saved[step] = self._lives[-1]

    def resume(self, step: int) -> None:
        """Begin another process, which continues from the checkpoint of ``step``."""
        self._lives.append(_Life(self._saved.get(step) or self._last_with(step), step))

    def _last_with(self, step: int) -> _Life[T]:
        """The last process that has a record of ``step``: who saved its checkpoint where nobody noted that."""
        lives = reversed(self._lives)
        return next((life for life in lives if any(at == step for at, _ in life.records)), self._lives[-1])

    def all(self) -> Iterator[T]:
        """Every record, in the order of adding."""
        return (record for life in self._lives for _, record in life.records)

    def standing(self) -> Iterator[T]:
        """The records that count, in order."""
        kept: list[list[T]] = []
        life, limit = self._lives[-1], None
        while life is not None:
            kept.append([record for step, record in life.records if limit is None or step <= limit])
            limit = life.step if limit is None else min(limit, life.step)
            life = life.parent
        return (record for records in reversed(kept) for record in records)
