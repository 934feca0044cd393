"""Which rounds of a run count: those of the processes that lead to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from recipe.partial_rollout.records.run_log import Checkpoint, Event, Round, RunSettings

T = TypeVar("T")


@dataclass(slots=True)
class _Life(Generic[T]):
    """One process of the run."""

    parent: _Life[T] | None
    """the process whose checkpoint it continues"""
    step: int
    """of that checkpoint"""
    rounds: list[tuple[int, T]] = field(default_factory=list)
    """step, and what is kept of it"""


class Lineage(Generic[T]):
    """What is kept of the rounds of a run, by process. Those count that lead to its end, from checkpoint to checkpoint.

    A process that resumes undoes what is beyond its checkpoint, once it has a round itself. Here rounds 1 to 3 of the first
    process count and 4 of the third; each step had a checkpoint::

        first   1  2  3
        second     2        resumed from step 1
        third            4  resumed from step 3

    Args:
        keep: what to keep of a round.
    """

    def __init__(self, keep: Callable[[Round], T]) -> None:
        self._keep = keep
        self._lives: list[_Life[T]] = []
        self._saved: dict[int, _Life[T]] = {}
        """by step: the process that saved its checkpoint last"""

    def take(self, event: Event) -> None:
        """Take the next event of the run."""
        match event:
            case RunSettings(resumed=step):
                parent = self._saved.get(step) or self._last_with(step) if self._lives else None
                self._lives.append(_Life(parent, step))
            case Round():
                self._lives[-1].rounds.append((event.step, self._keep(event)))
            case Checkpoint(step):
                self._saved[step] = self._lives[-1]

    def _last_with(self, step: int) -> _Life[T]:
        """The last process that has a round of ``step``: who saved its checkpoint where nobody noted that."""
        lives = reversed(self._lives)
        return next((life for life in lives if any(at == step for at, _ in life.rounds)), self._lives[-1])

    def all(self) -> Iterator[T]:
        """What is kept of every round, in their order."""
        return (kept for life in self._lives for _, kept in life.rounds)

    def standing(self) -> Iterator[T]:
        """Of those that count, in order."""
        kept: list[list[T]] = []
        life, limit = next((life for life in reversed(self._lives) if life.rounds), None), None
        while life is not None:
            kept.append([each for step, each in life.rounds if limit is None or step <= limit])
            limit = life.step if limit is None else min(limit, life.step)
            life = life.parent
        return (each for rounds in reversed(kept) for each in rounds)
