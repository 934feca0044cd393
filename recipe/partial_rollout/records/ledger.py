"""``ledger.jsonl``: which prompts were admitted and trained, at which step and version. ``audit`` judges it.

One JSON object a line, appended and flushed line by line; a run that resumes appends to the file of the run before.
``event`` is one of

* ``run``: the sizes of a process's training; its first line.
* ``resumed``: goes on from the checkpoint of ``step``; whatever the lines before say of later steps is undone (0: all).
* ``admitted``: ``uids`` admitted in the rollout of ``step`` under policy ``version``.
* ``filtered``: the ``groups`` that dynamic sampling consumed in ``step`` without training them.
* ``trained``: the ``groups`` of ``step``; ``version`` is that of the weights that the update started from.
* ``checkpoint``: that of ``step`` is whole.
* ``stopped``: the process ended on purpose before the training was over. ``complete``: the training is over;
  ``exhausted``: since the data could not fill another batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from recipe.partial_rollout.manager.types import FilteredGroup, TakenGroup
from recipe.partial_rollout.records.trained_group import TrainedGroup

NAME = "ledger.jsonl"


class Event(StrEnum):
    RUN = "run"
    RESUMED = "resumed"
    ADMITTED = "admitted"
    FILTERED = "filtered"
    TRAINED = "trained"
    CHECKPOINT = "checkpoint"
    STOPPED = "stopped"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class RunSizes:
    """The ``run`` event."""

    arm: str
    """``PR`` or ``noPR``"""
    samples_per_group: int
    batch_groups: int
    """N"""
    max_staleness: int
    epoch_prompts: int
    """prompts of an epoch that are trained"""
    total: int
    """prompts that the whole training trains, over its epochs"""
    offered: int
    """prompts that may be admitted: more than ``total`` where the training ends with prompts in flight (``drain=False``)
    or filters groups"""
    filters: bool = False
    """whether groups may be filtered: ``total`` are trained, of more that are consumed"""
    drains: bool = True
    """whether a training that reaches its last step leaves nothing in flight"""

    @classmethod
    def of(cls, event: dict[str, Any]) -> RunSizes:
        """Of a ``run`` event; older ledgers do not say what was offered, and filter nothing."""
        later = {
            "offered": event.get("offered", event["total"]),
            "filters": event.get("filters", False),
            "drains": event.get("drains", True),
        }
        return cls(**{item.name: event[item.name] for item in fields(cls) if item.name not in later}, **later)


class Ledger:
    """Appends to the ledger of one run directory (created if missing)."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / NAME
        cut_off = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("a", buffering=1)
        if cut_off:
            # What a killed process left of its last line must not swallow the next one.
            self._file.write("\n")

    def run(self, sizes: RunSizes) -> None:
        """A process starts the training, or goes on with it."""
        self._add(Event.RUN, **asdict(sizes))

    def resumed(self, step: int) -> None:
        """It goes on from the checkpoint of ``step``; 0: from scratch."""
        self._add(Event.RESUMED, step=step)

    def admitted(self, step: int, version: int, uids: Iterable[str]) -> None:
        """Groups admitted in the rollout of ``step``."""
        self._add(Event.ADMITTED, step=step, version=version, uids=list(uids))

    def trained(self, step: int, version: int, groups: Iterable[TakenGroup]) -> None:
        """Groups that ``step`` has trained, on the weights of ``version``."""
        rows = [TrainedGroup.of(group, version).to_ledger() for group in groups]
        self._add(Event.TRAINED, step=step, version=version, groups=rows)

    def filtered(self, step: int, version: int, groups: Iterable[FilteredGroup]) -> None:
        """Groups consumed in the rollout of ``step`` without being trained."""
        self._add(Event.FILTERED, step=step, version=version, groups=[asdict(group) for group in groups])

    def checkpoint(self, step: int) -> None:
        """The checkpoint of ``step`` is whole; what the ledger says of it reaches the disk."""
        self._add(Event.CHECKPOINT, step=step)
        self.sync()

    def stopped(self, step: int) -> None:
        """The process ends on purpose after ``step``."""
        self._add(Event.STOPPED, step=step)
        self.sync()

    def complete(self, *, exhausted: bool = False) -> None:
        """The training has reached its last step, or the end of its data (``exhausted``)."""
        self._add(Event.COMPLETE, **({"exhausted": True} if exhausted else {}))
        self.sync()

    def sync(self) -> None:
        """Return once every line is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def _add(self, event: Event, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}, separators=(",", ":")) + "\n")


class LedgerError(ValueError):
    """A ledger that cannot be read."""


def read_ledger(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The events, and how many lines were cut off because their process died while writing.

    Raises:
        LedgerError: the file is missing, or has a line that is no event and that no dying process can have left.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        raise LedgerError(f"{path} is missing: no training of this recipe ran in its directory") from None
    events: list[dict[str, Any]] = []
    cut_off = 0
    broken: int | None = None
    for number, line in enumerate(lines, start=1):
        event = _parse(line)
        if event is None:
            if broken is not None:
                raise _unreadable(path, broken)
            broken = number
            continue
        if broken is not None:
            if event["event"] not in (Event.RUN, Event.RESUMED):
                raise _unreadable(path, broken)
            broken, cut_off = None, cut_off + 1
        events.append(event)
    return events, cut_off + (broken is not None)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and event.get("event") in set(Event) else None


def _unreadable(path: Path, number: int) -> LedgerError:
    return LedgerError(f"{path}:{number} is not an event, and the run did not end or resume there")
