"""``ledger.jsonl``: the account of every prompt of a training. ``tools audit`` judges it.

A run that resumes appends to the file of the run before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from recipe.partial_rollout.manager.types import FilteredGroup
from recipe.partial_rollout.records.jsonl import JsonLines, iter_lines
from recipe.partial_rollout.records.ledger_events import (
    Admitted,
    Complete,
    Filtered,
    LedgerEvent,
    RunSizes,
    Stopped,
    Trained,
    from_json,
    to_json,
)
from recipe.partial_rollout.records.lineage import Checkpoint, Resumed
from recipe.partial_rollout.records.trained_group import TrainedGroup

NAME = "ledger.jsonl"


class Ledger:
    """Appends to the ledger of one run directory (created if missing)."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = JsonLines(run_dir / NAME)

    def run(self, sizes: RunSizes) -> None:
        """Note that a process starts the training, or continues it."""
        self._add(sizes)

    def resumed(self, step: int) -> None:
        """Note that it continues from the checkpoint of ``step``; 0: from scratch."""
        self._add(Resumed(step))

    def admitted(self, step: int, version: int, uids: Iterable[str]) -> None:
        """Note the groups admitted in the rollout of ``step``."""
        self._add(Admitted(step, version, list(uids)))

    def trained(self, step: int, version: int, groups: Sequence[TrainedGroup]) -> None:
        """Note the groups that ``step`` trained, starting from the weights of ``version``."""
        self._add(Trained(step, version, list(groups)))

    def filtered(self, step: int, version: int, groups: Iterable[FilteredGroup]) -> None:
        """Note the groups consumed in the rollout of ``step`` without being trained."""
        self._add(Filtered(step, version, list(groups)))

    def checkpoint(self, step: int) -> None:
        """Note that the checkpoint of ``step`` is whole, and sync the ledger to disk."""
        self._add(Checkpoint(step))
        self.sync()

    def stopped(self, step: int) -> None:
        """Note that the process ends on purpose after ``step``."""
        self._add(Stopped(step))
        self.sync()

    def complete(self, *, exhausted: bool = False) -> None:
        """Note that the training has reached its last step, or the end of its data (``exhausted``)."""
        self._add(Complete(exhausted))
        self.sync()

    def sync(self) -> None:
        """Sync every line to disk."""
        self._lines.sync()

    def _add(self, event: LedgerEvent) -> None:
        self._lines.add(to_json(event))


def iter_ledger(path: Path, warnings: list[str]) -> Iterator[tuple[int, LedgerEvent]]:
    """The events, one at a time, each with the byte at which its line begins.

    Args:
        warnings: gets a line for each line that was cut off because its process died while writing.

    Raises:
        RunRecordError: the file is missing, or a line is not an event; names it.
    """
    for line in iter_lines(path, warnings, restarts=(RunSizes.EVENT, Resumed.EVENT)):
        yield line.at, from_json(line)
