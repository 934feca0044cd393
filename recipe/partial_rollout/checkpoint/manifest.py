"""The recipe's files in a checkpoint: state files, and a manifest that lists all files and is written last.

A step directory with a valid manifest is whole. ``verify`` compares the sizes of all files, and the hashes of the state
files, before any state is read. A state file is one packed dictionary, of the manager or of the prompt source.

``begin`` marks a directory before anything is written to it, ``seal`` completes it::

    begin(step_dir) -> verl's files, state files -> seal(step_dir, manifest)

A directory that was begun and not sealed is torn. One that was never begun is foreign: verl alone wrote it.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs

from recipe.partial_rollout.checkpoint.plain_state import pack, unpack

DIRECTORY = "partial_rollout"
"""directory of the recipe's own files within a step directory"""
NAME = "manifest.json"
Format = Literal[6]
"""version of the format of the manifest and the state files; a change of either increments it"""

STEP = re.compile(r"global_step_([0-9]+)")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be resumed: this version of the recipe did not make it, or it is torn."""


class TornCheckpointError(CheckpointError):
    """A checkpoint of partial rollout that is not whole."""


class ListedFile(Struct, frozen=True):
    """A file of the checkpoint."""

    size: int
    """bytes"""
    blake2b: str | None
    """256 bits, hex; None if only its size is checked"""


class Manifest(Struct, frozen=True, kw_only=True):
    """Lists the files of a whole checkpoint, and the facts that a resume needs."""

    format: Format = 6
    step: int
    run: str
    """id of the run, by which trackers know it"""
    run_dir: str
    """absolute path of the run directory at the seal; a run that resumes it elsewhere (in a copy) takes a new id"""
    state: str
    """suffix of the names of its state files (``state_file``); files of an earlier seal may lie beside them"""
    made_of: dict[str, Any] = {}
    """values that a run must match to resume from it, by config key, e.g. {"data.train_batch_size": 64}; JSON-able"""
    kept: list[int] = []
    """steps of the checkpoints saved under a limit (``RunCheckpoints``' ``keep``), oldest first; only they are removed
    """
    files: dict[str, ListedFile] = {}
    """its files by path relative to the step directory"""


class _Sealed(Struct):
    blake2b: str
    """checksum of ``manifest``, byte for byte"""
    manifest: msgspec.Raw


def begin(step_dir: Path) -> None:
    """Mark ``step_dir`` as a checkpoint of the recipe in progress, before anything else is written there.

    An earlier checkpoint of the same step is then no longer whole.
    """
    ours = step_dir / DIRECTORY
    ours.mkdir(parents=True, exist_ok=True)
    # Before verl overwrites a file that the manifest lists: from here to the seal the step is torn.
    (ours / NAME).unlink(missing_ok=True)
    for directory in (ours, step_dir, step_dir.parent):
        sync(directory)


def state_file(step_dir: Path, part: str, state: str) -> Path:
    """The file of ``part`` (``manager``, ``source``) in the checkpoint whose manifest says ``state``."""
    return step_dir / DIRECTORY / f"{part}-{state}.state"


def write_snapshot(path: Path, state: dict[str, Any]) -> None:
    """Write ``state``, atomically.

    Raises:
        UnsaveableError: it holds a value that is neither plain nor numpy; the message names its path.
    """
    write_atomically(path, pack(state))


def read_snapshot(path: Path) -> dict[str, Any]:
    """Read the dictionary that ``write_snapshot`` wrote; ``verify`` has compared its checksum."""
    return unpack(path.read_bytes())


def seal(step_dir: Path, manifest: Manifest) -> None:
    """Make the checkpoint whole: sync its files to disk, then write ``manifest`` with the list of these files."""
    ours = step_dir / DIRECTORY
    # verl's files are gigabytes, so only their sizes are checked; ours are read back whole.
    own = {path: _checksum(path) for path in ours.glob(f"*-{manifest.state}.state")}
    within = [path for path in step_dir.rglob("*") if ours not in path.parents]
    listed = [*filter(Path.is_file, within), *own]
    for path in (*listed, *filter(Path.is_dir, within), step_dir, step_dir.parent):
        sync(path)
    files = {
        path.relative_to(step_dir).as_posix(): ListedFile(path.stat().st_size, own.get(path)) for path in sorted(listed)
    }
    write_manifest(step_dir, structs.replace(manifest, files=files))


def write_manifest(step_dir: Path, manifest: Manifest) -> None:
    """Write ``manifest`` into ``step_dir``, atomically. ``seal`` also lists and syncs the files."""
    content = msgspec.json.encode(manifest)
    sealed = _Sealed(hashlib.blake2b(content, digest_size=32).hexdigest(), msgspec.Raw(content))
    write_atomically(step_dir / DIRECTORY / NAME, msgspec.json.encode(sealed))


def verify(step_dir: Path) -> Manifest:
    """Return the manifest of a whole checkpoint, and check that every file that it lists is unchanged.

    Raises:
        TornCheckpointError: it was begun and not sealed, or a file is missing or changed.
        CheckpointError: this version of the recipe did not make it.
    """
    manifest = read(step_dir)
    named = STEP.fullmatch(step_dir.name)
    if named and int(named[1]) != manifest.step:
        raise foreign(step_dir, f"its content is of step {manifest.step}")
    for name, listed in manifest.files.items():
        path = step_dir / name
        if not path.is_file():
            raise torn(step_dir, f"{name} is missing")
        if path.stat().st_size != listed.size:
            raise torn(step_dir, f"{name} has {path.stat().st_size} bytes of {listed.size}")
        if listed.blake2b is not None and _checksum(path) != listed.blake2b:
            raise torn(step_dir, f"the checksum of {name} does not agree with its content")
    return manifest


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def read(step_dir: Path) -> Manifest:
    """Return the manifest of ``step_dir`` without checking the files that it lists; raise as ``verify`` does."""
    if not any(step_dir.iterdir()):
        # A process that was killed between its first two directories leaves it so.
        raise torn(step_dir, "it is empty")
    if not (step_dir / DIRECTORY).is_dir():
        raise foreign(step_dir, f"it has no {DIRECTORY}/: another trainer made it")
    changed = f"{DIRECTORY}/{NAME} is cut off or changed"
    try:
        sealed = msgspec.json.decode((step_dir / DIRECTORY / NAME).read_bytes(), type=_Sealed)
        if sealed.blake2b != hashlib.blake2b(sealed.manifest, digest_size=32).hexdigest():
            raise torn(step_dir, changed)
        return msgspec.json.decode(sealed.manifest, type=Manifest)
    except FileNotFoundError:
        raise torn(step_dir, "it has no manifest: the checkpoint was not finished") from None
    except OSError as error:
        raise foreign(step_dir, f"its manifest cannot be read ({error.strerror})") from None
    except msgspec.ValidationError as error:
        raise foreign(step_dir, f"its manifest is not of this version's format ({error})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise torn(step_dir, changed) from None


def torn(path: Path, reason: str) -> TornCheckpointError:
    """The one-line error for a checkpoint that is not whole."""
    return TornCheckpointError(
        f"{path} is torn: {reason}; resume from an earlier step (trainer.resume_mode=auto finds the newest whole one)"
    )


def foreign(path: Path, reason: str) -> CheckpointError:
    """The one-line error for a checkpoint that this recipe did not make."""
    return CheckpointError(
        f"{path} cannot be resumed by partial rollout: {reason}; "
        f"set another trainer.default_local_dir, or trainer.resume_mode=disable to start over"
    )


# -- durable files ------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` under a temporary name, fsync, rename, fsync the directory."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    # A rename is on disk only once its directory is.
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync file or directory ``path`` to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
