"""JSON lines files: appended to by a run that may be killed at any moment, and read back.

The writer ends every line before it begins the next, so each process of a run can leave at most one torn line, its last.
A reader therefore skips a torn line at the end of a file or before the first line of the next process; anywhere else it
is an error. A field that is missing or mistyped is a one-line error too, never a traceback.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args, get_origin, get_type_hints

from recipe.partial_rollout.checkpoint.snapshot import write_atomically

T = TypeVar("T")
Positive = Annotated[int, 1]
"""an integer of at least 1; a plain ``int`` field is at least 0"""


class RunRecordError(ValueError):
    """A run directory cannot be read; the message names the file, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object, and the place it came from for error messages.

    >>> Fields("trace.jsonl line 3", {"event": "checkpoint", "step": 4}).read(Checkpoint)
    Checkpoint(step=4)
    """

    place: str
    """File, and line where it has lines."""
    values: dict[str, Any]
    at: int = 0
    """Byte of the file at which its line begins."""

    def read(self, kind: type[T], keys: Mapping[str, str] | None = None, **known: Any) -> T:
        """Dataclass ``kind`` from the fields of its names; what may be None or has a default may be missing.

        Args:
            keys: by name, the key of each field that is read, for which no default stands in; None: all, by their names.
            known: values that are not read.

        Raises:
            RunRecordError: a field is missing or of another type.
        """
        for name, hint, default in _schema(kind):
            if name in known:
                continue
            if keys is None:
                known[name] = self.get(name, hint, default)
            elif name in keys:
                known[name] = self.get(keys[name], hint, None if default is None else MISSING)
        return kind(**known)

    def get(self, key: str, kind: Any, default: Any = MISSING) -> Any:
        """Field ``key``, checked; ``kind`` is a type as a dataclass annotates it.

        Raises:
            RunRecordError: it is of another type, or missing without a ``default``.
        """
        kind, least = get_args(kind) if get_origin(kind) is Annotated else (kind, 0)
        value = self.values.get(key)
        if value is None and default is not MISSING:
            return default
        item = get_args(kind)[0] if get_origin(kind) is list else None
        if isinstance(item, type) and is_dataclass(item):
            return [each.read(item) for each in self.objects(key)]
        if key not in self.values:
            raise RunRecordError(f"{self.place}: '{key}' is missing; it should be {_wanted(kind)}")
        try:
            found = _parsed(value, kind)
        except ValueError:
            raise RunRecordError(f"{self.place}: '{key}' is {value!r:.60}; it should be {_wanted(kind)}") from None
        if kind is int and found < least:
            raise RunRecordError(f"{self.place}: '{key}' is {value}; it should be at least {least}")
        return found

    def objects(self, key: str) -> list[Fields]:
        """The objects in list ``key``."""
        return [Fields(f"{self.place}, {key}", value) for value in self.get(key, list[dict])]

    def span(self) -> tuple[float, float]:
        """`start` and `end`, in seconds."""
        start, end = self.get("start", float), self.get("end", float)
        if end < start:
            raise RunRecordError(f"{self.place}: it ends ({end}) before it starts ({start})")
        return start, end


@cache
def _schema(kind: type) -> list[tuple[str, Any, Any]]:
    """Name, type and default (MISSING: none) of each field of dataclass ``kind``; a type or None is the type alone."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for each in fields(kind):
        hint, default = hints[each.name], each.default
        if NoneType in get_args(hint):
            (hint,) = (arm for arm in get_args(hint) if arm is not NoneType)
            default = None if default is MISSING else default
        found.append((each.name, hint, default))
    return found


_WORDS = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _wanted(kind: Any) -> str:
    """``kind`` in words."""
    if get_args(kind):
        return f"a list, each entry {_wanted(get_args(kind)[0])}"
    return _WORDS.get(kind) or f"one of {', '.join(kind)}"


def _parsed(value: Any, kind: Any) -> Any:
    """``value``, as JSON gives it, as a ``kind``; ValueError if it is none."""
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    entries = get_args(kind)
    if entries and type(value) is list:
        if get_origin(kind) is list:
            return [_parsed(each, entries[0]) for each in value]
        return tuple(_parsed(each, entry) for each, entry in zip(value, entries, strict=True))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    raise ValueError


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse one JSON object; ValueError for anything else."""
    values = json.loads(raw)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def unreadable(path: Path, error: OSError) -> RunRecordError:
    return RunRecordError(
        f"{path}: cannot be read ({error.strerror}); give the directory of a run, "
        "which holds run.json, metrics.jsonl, trace.jsonl and, of PR, ledger.jsonl"
    )


def read_object(path: Path) -> Fields:
    try:
        return Fields(str(path), parse_object(path.read_bytes()))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise RunRecordError(f"{path}: not a JSON object ({error}); rerun, or repair the file") from error


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


def kinds_of(events: Any) -> dict[str, Any]:
    """The kinds in a union of events, by their ``EVENT``."""
    return {kind.EVENT: kind for kind in get_args(events)}


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
