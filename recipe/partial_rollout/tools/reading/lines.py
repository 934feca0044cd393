"""JSON lines files, read back with their types checked.

A torn line is skipped at the end of a file or before the first line of the next process, as a crash leaves it; anywhere
else it is an error. A field that is missing or mistyped is a one-line error too, never a traceback.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from recipe.partial_rollout.records.jsonl import parse_object

T = TypeVar("T")


class RunRecordError(ValueError):
    """A run directory cannot be read; the message names the file, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object, and the place it came from for error messages.

    >>> from recipe.partial_rollout.records.jsonl import Checkpoint
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


def kinds_of(events: Any) -> dict[str, Any]:
    """The kinds in a union of events, by their ``EVENT``."""
    return {kind.EVENT: kind for kind in get_args(events)}
