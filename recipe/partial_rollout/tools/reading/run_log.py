"""``run.jsonl`` and other JSON lines files, read back with their types checked.

A torn line is skipped at the end of a file or before the first line of the next process, as a crash leaves it; anywhere
else it is an error. A field that is missing or mistyped is a one-line error too, never a traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
from msgspec import structs

from recipe.partial_rollout.records.run_log import METRICS, NAME, Event, Round, RunSettings
from recipe.partial_rollout.tools.reading.columns import CallColumns


class RunRecordError(ValueError):
    """A run directory cannot be read; the message names the file, what is wrong, and what to do."""


def read_log(run_dir: Path, warnings: list[str]) -> Iterator[Event]:
    """The events of the run, one at a time, the calls of each round as ``CallColumns``.

    Args:
        warnings: gets a line for each torn line that is skipped.

    Raises:
        RunRecordError: the file is missing or has no event, or a line is not an event of this run; names it.
    """
    path, begun = run_dir / NAME, False
    for place, event in iter_lines(path, Event, warnings, restart=RunSettings):
        begun |= isinstance(event, RunSettings)
        if not begun:
            raise RunRecordError(
                f"{place}: the log does not begin with an event 'run', so its beginning is missing; give another run"
            )
        if isinstance(event, Round):
            event = structs.replace(event, phase=structs.replace(event.phase, calls=_columns(event, place)))
        yield event
    if not begun:
        raise RunRecordError(f"{path} has no event")


def _columns(round_: Round, place: str) -> CallColumns:
    try:
        return CallColumns(round_.phase.calls)
    except (ValueError, OverflowError) as error:
        raise RunRecordError(
            f"{place}: a call has a replica without an index, or a number beyond 32 bits ({error})"
        ) from None


def iter_lines(path: Path, kind: Any, warnings: list[str], restart: type = NoneType) -> Iterator[tuple[str, Any]]:
    """The lines of a JSON lines file as objects of ``kind``, one at a time, each with its place for error messages.

    Args:
        warnings: gets a line for each torn line that is skipped.
        restart: the kind with which another process of the run begins.

    Raises:
        RunRecordError: the file cannot be read, or a line is torn that a dying process cannot have left.
    """
    torn: str | None = None
    decode = msgspec.json.Decoder(kind).decode
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                place = f"{path} line {number}"
                try:
                    found = decode(line)
                except msgspec.ValidationError as error:
                    raise RunRecordError(torn or f"{place}: {error}") from None
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    if torn:
                        raise RunRecordError(torn) from None
                    torn = f"{place}: torn ({error}), yet no process began after it: remove the line, or rerun"
                    warnings.append(f"{place}: torn, as a crash leaves it; the line is left out")
                    continue
                if torn and not isinstance(found, restart):
                    raise RunRecordError(torn)
                torn = None
                yield place, found
    except OSError as error:
        words = f"give the directory of a run, which holds {NAME} and {METRICS}"
        raise RunRecordError(f"{path}: cannot be read ({error.strerror}); {words}") from error
