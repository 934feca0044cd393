"""JSON lines files: appended to by a run that may be killed at any moment (``tools/reading`` reads them).

The writer ends every line before it begins the next, so each process of a run can leave at most one torn line, its last.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from recipe.partial_rollout.checkpoint.snapshot import write_atomically

Positive = Annotated[int, 1]
"""an integer of at least 1; a plain ``int`` field is at least 0"""


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse one JSON object; ValueError for anything else."""
    values = json.loads(raw)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


class JsonLines:
    """Appends one JSON object a line; each is in the file as soon as it is added."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.continues = path.exists()
        """whether an earlier process of the run has written to it"""
        torn = self.continues and not _ends_a_line(path)
        self._file = path.open("a", buffering=1)
        if torn:
            # If a killed process left an unfinished line, the next one must start on a line of its own.
            self._file.write("\n")

    def add(self, values: dict[str, Any]) -> None:
        """Write one more line."""
        self._file.write(json.dumps(values) + "\n")

    def sync(self) -> None:
        """Sync every line to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


METRICS = "metrics.jsonl"
"""verl's log of the steps, ``{"step": int, "data": {...}}`` a line"""


def cut_steps(metrics: Path, step: int, aside: Path) -> None:
    """Move the lines of ``metrics`` that are beyond ``step``, and torn ones, to a file in directory ``aside``."""
    kept, cut = [], []
    for raw in metrics.open("rb") if metrics.exists() else ():
        try:
            stays = raw.endswith(b"\n") and parse_object(raw)["step"] <= step
        except (ValueError, KeyError, TypeError, RecursionError):
            stays = False
        (kept if stays else cut).append(raw)
    if cut:
        aside.mkdir(parents=True, exist_ok=True)
        (aside / f"{metrics.stem}_beyond_{step}.jsonl").write_bytes(b"".join(cut))
        write_atomically(metrics, kept)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run continues from the checkpoint of ``step`` (0: from scratch): another process begins."""

    EVENT: ClassVar[str] = "resumed"
    step: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint of ``step`` is whole."""

    EVENT: ClassVar[str] = "checkpoint"
    step: int


def event_line(event: Any) -> dict[str, Any]:
    """The line of an event, a dataclass of plain values with an ``EVENT``."""
    return {"event": event.EVENT, **asdict(event)}
