"""JSON lines files: appended to by a run that may be killed at any moment, and read back.

The writer ends every line before it begins the next, so each process of a run can leave at most one torn line, its last.
A reader therefore skips a torn line at the end of a file or before the first line of the next process; anywhere else it
is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container
from pathlib import Path
from typing import Any

from recipe.partial_rollout.records.fields import Fields, RunRecordError, parse_object, read_bytes


class JsonLines:
    """Writes one JSON object a line; each is in the file as soon as it is added.

    Args:
        append: to what an earlier process of the run wrote, instead of starting the file over.
    """

    def __init__(self, path: Path, *, append: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.continues = append and path.exists()
        """whether there was a file to append to"""
        torn = self.continues and not _ends_a_line(path)
        self._file = path.open("a" if append else "w", buffering=1)
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


def read_lines(path: Path, restarts: Container[str] = ()) -> tuple[list[Fields], list[str]]:
    """The objects of a JSON lines file, and a warning for each torn line that was skipped.

    Args:
        restarts: values of ``event`` with which another process of the run begins.

    Raises:
        RunRecordError: the file cannot be read, or a line is torn that a dying process cannot have left.
    """
    lines: list[Fields] = []
    warnings: list[str] = []
    torn: RunRecordError | None = None
    for number, raw in enumerate(read_bytes(path).split(b"\n"), start=1):
        if not raw.strip():
            continue
        place = f"{path} line {number}"
        try:
            values = parse_object(raw)
        except (ValueError, RecursionError) as error:
            if torn is not None:
                raise torn from None
            torn = _torn(place, error)
            warnings.append(f"{place}: torn, as a crash leaves it; the line is left out")
            continue
        if torn is not None and str(values.get("event")) not in restarts:
            raise torn
        torn = None
        lines.append(Fields(place, values))
    return lines, warnings


def _torn(place: str, error: Exception) -> RunRecordError:
    return RunRecordError(
        f"{place}: not a JSON object ({error}), and the run did not end or resume there: remove the line, or rerun"
    )
