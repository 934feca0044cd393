"""Which rounds of a run count, and which process began last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from recipe.partial_rollout.records.run_log import Ended, Event, Round, RunSettings

T = TypeVar("T")


class Lineage(Generic[T]):
    """The rounds of a run that count.

    A process that resumes undoes the rounds after its checkpoint. In this example round 1 of the first process counts,
    and rounds 2 and 3 of the second::

        first   1  2
        second     2  3     resumed from step 1

    A process can resume from a checkpoint that an earlier start set aside. The log is then replaced by the one that was
    set aside with the checkpoint (``RunFiles.begin``), so the log has the rounds before every resumed checkpoint.

    Args:
        keep: returns the value to keep for a round.
    """

    def __init__(self, keep: Callable[[Round], T]) -> None:
        self._keep = keep
        self.settings: RunSettings
        """settings of the process that began last; not set before the first event"""
        self.ended: Ended | None = None
        """how that process ended, if on purpose"""
        self._standing: list[tuple[int, T]] = []
        """step, and what is kept of it"""
        self.undone: list[T] = []

    def take(self, event: Event) -> None:
        """Take the next event of the run."""
        match event:
            case RunSettings(resumed=last):
                self.settings, self.ended = event, None
                self.undone += [kept for step, kept in self._standing if step > last]
                self._standing = [(step, kept) for step, kept in self._standing if step <= last]
            case Round(step=step):
                self._standing.append((step, self._keep(event)))
            case Ended():
                self.ended = event

    def standing(self) -> list[T]:
        """The rounds that count, in order."""
        return [kept for _, kept in self._standing]
