"""JSON lines files: appended to by a run that may be killed at any moment, and read back.

The writer ends every line before it begins the next, so each process of a run can leave at most one torn line, its last.
A reader therefore skips a torn line at the end of a file or before the first line of the next process; anywhere else it
is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from recipe.partial_rollout.records.fields import Fields, RunRecordError, parse_object, unreadable


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


def read_lines(path: Path) -> tuple[list[Fields], list[str]]:
    """``iter_lines``, all at once: the objects, and the warnings."""
    warnings: list[str] = []
    return list(iter_lines(path, warnings)), warnings


def iter_lines(path: Path, warnings: list[str], restarts: Container[str] = ()) -> Iterator[Fields]:
    """The objects of a JSON lines file, one at a time, however long the file is.

    Args:
        warnings: gets a line for each torn line that is skipped.
        restarts: values of ``event`` with which another process of the run begins.

    Raises:
        RunRecordError: the file cannot be read, or a line is torn that a dying process cannot have left.
    """
    torn: RunRecordError | None = None
    at = 0
    for number, raw in enumerate(_raw_lines(path), start=1):
        begins, at = at, at + len(raw)
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
        yield Fields(place, values, begins)


def line_at(path: Path, at: int) -> Fields:
    """The object whose line begins at byte ``at``, as ``iter_lines`` gave it."""
    with path.open("rb") as file:
        file.seek(at)
        return Fields(f"{path} byte {at}", parse_object(file.readline()), at)


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise unreadable(path, error) from error


def _torn(place: str, error: Exception) -> RunRecordError:
    return RunRecordError(
        f"{place}: not a JSON object ({error}), and the run did not end or resume there: remove the line, or rerun"
    )
