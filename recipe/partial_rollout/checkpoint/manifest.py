"""The manifest of a checkpoint, written last: a step directory with a valid one is whole.

``begin`` marks a directory before anything is written to it, ``seal`` ends it::

    begin(step_dir) -> verl's files, snapshots -> seal(step_dir)

A directory that was begun and not sealed is torn; one that was never begun is foreign: verl's own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from recipe.partial_rollout.checkpoint.lineage import Lineage
from recipe.partial_rollout.checkpoint.snapshot import (
    PART,
    ForeignCheckpointError,
    TornCheckpointError,
    checksum,
    foreign,
    sync,
    torn,
    write_atomically,
)

DIRECTORY = "partial_rollout"
"""directory of the recipe's own files within a step directory"""
NAME = "manifest.json"
FORMAT = 3

_STEP = re.compile(r"global_step_([0-9]+)")


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of the checkpoint."""

    size: int
    """bytes"""
    blake2b: str | None
    """256 bits, hex; None if only its size is checked"""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a whole checkpoint consists of."""

    step: int
    life: str
    """id of the process that sealed it (``lineage``)"""
    facts: dict[str, Any]
    """what the trainer wants to record; JSON-able"""
    files: dict[str, ListedFile]
    """by path relative to the step directory"""


def begin(step_dir: Path) -> Path:
    """Mark ``step_dir`` as a checkpoint of the recipe in progress; returns the directory of the recipe's own files.

    Call it before anything else is written there. An earlier checkpoint of the same step is then no longer whole.
    """
    ours = step_dir / DIRECTORY
    ours.mkdir(parents=True, exist_ok=True)
    (ours / NAME).unlink(missing_ok=True)
    for directory in (ours, step_dir, step_dir.parent):
        sync(directory)
    return ours


def seal(
    step_dir: Path,
    step: int,
    life: str,
    facts: dict[str, Any],
    *,
    leave_out: frozenset[str] = frozenset(),
) -> Manifest:
    """Make the checkpoint of ``step`` whole: its files are synced to disk, then the manifest that lists them.

    Args:
        leave_out: files (relative to ``step_dir``) that an older manifest names and that are about to be removed.
    """
    files: dict[str, ListedFile] = {}
    directories = {step_dir, step_dir.parent}
    for path in sorted(step_dir.rglob("*")):
        name = path.relative_to(step_dir).as_posix()
        if path.is_dir():
            directories.add(path)
        elif name != f"{DIRECTORY}/{NAME}" and name not in leave_out and not name.endswith(PART):
            sync(path)
            wanted = name.startswith(f"{DIRECTORY}/")
            files[name] = ListedFile(path.stat().st_size, checksum(path) if wanted else None)
    for directory in directories:
        sync(directory)
    manifest = Manifest(step, life, facts, files)
    fields = {"format": FORMAT, **asdict(manifest)}
    text = json.dumps({"blake2b": _digest(fields), **fields}, indent=1)
    write_atomically(step_dir / DIRECTORY / NAME, [text.encode()])
    return manifest


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=32).hexdigest()


def verify(step_dir: Path) -> Manifest:
    """The manifest of a whole checkpoint, after checking that every file that it lists is unchanged.

    Raises:
        TornCheckpointError: it was begun and not sealed, or a file is missing or changed.
        ForeignCheckpointError: this version of the recipe did not make it.
    """
    manifest = _read(step_dir)
    named = _STEP.fullmatch(step_dir.name)
    if named and int(named[1]) != manifest.step:
        raise foreign(step_dir, f"its content is of step {manifest.step}")
    for name, listed in manifest.files.items():
        path = step_dir / name
        if not path.is_file():
            raise torn(step_dir, f"{name} is missing")
        if path.stat().st_size != listed.size:
            raise torn(step_dir, f"{name} has {path.stat().st_size} bytes of {listed.size}")
        if listed.blake2b is not None and checksum(path) != listed.blake2b:
            raise torn(step_dir, f"the checksum of {name} does not agree with its content")
    return manifest


def _read(step_dir: Path) -> Manifest:
    if not (step_dir / DIRECTORY).is_dir():
        raise foreign(step_dir, f"it has no {DIRECTORY}/: another trainer made it")
    path = step_dir / DIRECTORY / NAME
    try:
        fields = json.loads(path.read_bytes())
        whole = isinstance(fields, dict) and fields.pop("blake2b", None) == _digest(fields)
    except FileNotFoundError:
        raise torn(step_dir, "it has no manifest: the checkpoint was not finished") from None
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise torn(step_dir, f"{DIRECTORY}/{NAME} is cut off or changed")
    if fields.pop("format", None) != FORMAT:
        raise foreign(step_dir, f"its manifest is not of format {FORMAT}")
    if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in fields["files"]):
        raise foreign(step_dir, "its manifest names files outside of it")
    files = {name: ListedFile(**listed) for name, listed in fields["files"].items()}
    return Manifest(fields["step"], fields["life"], fields["facts"], files)


def newest_whole(run_dir: Path, lineage: Lineage) -> tuple[Manifest | None, list[str]]:
    """The manifest of the newest whole ``global_step_N`` of ``lineage`` in ``run_dir``, and a line for each newer torn one.

    Steps grow along a lineage, so the newest is the highest.

    Raises:
        ForeignCheckpointError: a newer one was made by something else; the message says what to do.
    """
    refused: list[str] = []
    for step, step_dir in sorted(steps_in(run_dir), reverse=True):
        try:
            if lineage.holds(_read(step_dir).life, step):
                return verify(step_dir), refused
        except TornCheckpointError as error:
            refused.append(str(error))
    return None, refused


def superseded(run_dir: Path, lineage: Lineage, *, unsealed: bool) -> Iterator[Path]:
    """The checkpoints in ``run_dir`` that do not lead to the present; torn ones if ``unsealed``."""
    for step, step_dir in steps_in(run_dir):
        try:
            stands = lineage.holds(_read(step_dir).life, step)
        except TornCheckpointError:
            stands = not unsealed
        except ForeignCheckpointError:
            stands = False
        if not stands:
            yield step_dir


def steps_in(run_dir: Path) -> list[tuple[int, Path]]:
    """Number and directory of each ``global_step_N`` in ``run_dir``."""
    found = ((_STEP.fullmatch(path.name), path) for path in run_dir.glob("global_step_*"))
    return [(int(match[1]), path) for match, path in found if match and path.is_dir()]
