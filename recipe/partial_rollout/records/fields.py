"""Checked access to JSON written by a run: a missing or mistyped field gives a one-line error, never a traceback."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class RunRecordError(ValueError):
    """A run directory cannot be read; the message names the file, what is wrong, and what to do."""


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object, and the place it came from for error messages."""

    place: str
    """File, and line where it has lines."""
    values: dict[str, Any]
    at: int = 0
    """Byte of the file at which its line begins."""

    def _get(self, key: str, kinds: tuple[type, ...], wanted: str) -> Any:
        if key not in self.values:
            raise RunRecordError(f"{self.place}: '{key}' is missing; it should be {wanted}")
        value = self.values[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise RunRecordError(f"{self.place}: '{key}' is {value!r:.60}; it should be {wanted}")
        return value

    def integer(self, key: str, least: int = 0) -> int:
        value = self._get(key, (int,), "an integer")
        if value < least:
            raise RunRecordError(f"{self.place}: '{key}' is {value}; it should be at least {least}")
        return value

    def number(self, key: str) -> float:
        return float(self._get(key, (int, float), "a number"))

    def text(self, key: str) -> str:
        return self._get(key, (str,), "a string")

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A boolean; ``default`` if the field is missing, which is an error if ``default`` is None."""
        if default is not None and key not in self.values:
            return default
        return self._get(key, (bool,), "true or false")

    def items(self, key: str) -> list[Any]:
        return self._get(key, (list,), "a list")

    def integers(self, key: str) -> list[int]:
        values = self.items(key)
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            raise RunRecordError(f"{self.place}: '{key}' should be a list of integers")
        return values

    def integer_rows(self, key: str, width: int) -> list[list[int]]:
        rows = self.items(key)
        for row in rows:
            if not isinstance(row, list) or len(row) != width or not all(type(value) is int for value in row):
                raise RunRecordError(f"{self.place}: '{key}' should hold lists of {width} integers, got {row!r:.60}")
        return rows

    def flags(self, key: str) -> list[bool]:
        values = self.items(key)
        if not all(isinstance(value, bool) for value in values):
            raise RunRecordError(f"{self.place}: '{key}' should be a list of true and false")
        return values

    def texts(self, key: str) -> list[str]:
        values = self.items(key)
        if not all(isinstance(value, str) for value in values):
            raise RunRecordError(f"{self.place}: '{key}' should be a list of strings")
        return values

    def objects(self, key: str, wanted: str = "objects") -> list["Fields"]:
        for value in (values := self.items(key)):
            if not isinstance(value, dict):
                raise RunRecordError(f"{self.place}: '{key}' should hold {wanted}, got {value!r:.60}")
        return [Fields(f"{self.place}, {key}", value) for value in values]

    def object(self, key: str) -> "Fields":
        return Fields(f"{self.place}, {key}", self._get(key, (dict,), "an object"))

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def optional_text(self, key: str) -> str | None:
        return None if self.values.get(key) is None else self.text(key)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def optional_spans(self, key: str) -> list[tuple[float, float]]:
        """Pairs of start and end, in seconds; none if the field is missing."""
        rows = self.items(key) if key in self.values else []
        for row in rows:
            match row:
                case [int() | float() as start, int() | float() as end] if start <= end:
                    continue
            raise RunRecordError(f"{self.place}: '{key}' should hold pairs of start and end, got {row!r:.60}")
        return [(float(start), float(end)) for start, end in rows]

    def span(self) -> tuple[float, float]:
        """`start` and `end`, in seconds."""
        start, end = self.number("start"), self.number("end")
        if end < start:
            raise RunRecordError(f"{self.place}: it ends ({end}) before it starts ({start})")
        return start, end


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
