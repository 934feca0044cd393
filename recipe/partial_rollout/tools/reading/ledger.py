"""``ledger.jsonl``, read back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from recipe.partial_rollout.manager.types import position_of
from recipe.partial_rollout.records.jsonl import Resumed
from recipe.partial_rollout.records.ledger import LedgerEvent, RunSizes, Trained
from recipe.partial_rollout.records.trained_group import IN_LEDGER, TrainedGroup
from recipe.partial_rollout.tools.reading.lines import Fields, RunRecordError, iter_lines, kinds_of

_KINDS = kinds_of(LedgerEvent)


def iter_ledger(path: Path, warnings: list[str]) -> Iterator[tuple[int, LedgerEvent]]:
    """The events, one at a time, each with the byte at which its line begins.

    Args:
        warnings: gets a line for each line that was cut off because its process died while writing.

    Raises:
        RunRecordError: the file is missing, or a line is not an event; names it.
    """
    for line in iter_lines(path, warnings, restarts=(RunSizes.EVENT, Resumed.EVENT)):
        yield line.at, event_of(line)


def event_of(line: Fields) -> LedgerEvent:
    """The inverse of ``to_json``.

    Raises:
        RunRecordError: the event is unknown, or a field is missing or of another type; names the line.
    """
    event = line.get("event", str)
    if event not in _KINDS:
        raise RunRecordError(f"{line.place}: '{event}' is no event of a ledger")
    kind = _KINDS[event]
    if kind is Trained:
        return line.read(kind, groups=[booked_of(group) for group in line.objects("groups")])
    return line.read(kind)


def booked_of(fields: Fields) -> TrainedGroup:
    """The inverse of ``TrainedGroup.to_ledger``.

    Raises:
        RunRecordError: a field is missing or of another type.
    """
    uid, parts = fields.get("uid", str), fields.get("lengths", list[list[int]])
    if not re.fullmatch(r"\d+/\d+", uid):
        raise RunRecordError(f"{fields.place}: 'uid' is {uid!r:.60}; it should be epoch/position")
    if wrong := [row for row in parts if len(row) != 4]:
        raise RunRecordError(f"{fields.place}: 'lengths' should hold lists of 4 integers, got {wrong[0]!r:.60}")
    return fields.read(TrainedGroup, IN_LEDGER, epoch=position_of(uid)[0], lengths=[row[0] for row in parts])
