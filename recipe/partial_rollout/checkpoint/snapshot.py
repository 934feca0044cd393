"""Files that are whole or absent, and the state files of a checkpoint: one packed dictionary each.

A state file is sealed with its checkpoint: ``manifest`` has the hash of each, and is verified before any is read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recipe.partial_rollout.checkpoint.plain_codec import pack, unpack


class TornCheckpointError(RuntimeError):
    """A checkpoint of partial rollout that is not whole."""


class ForeignCheckpointError(RuntimeError):
    """A checkpoint that this version of the recipe did not make."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` under a temporary name, fsync, rename, fsync the directory."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync file or directory ``path`` to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_snapshot(path: Path, state: dict[str, Any]) -> None:
    """Write ``state``, atomically.

    Raises:
        UnsaveableError: it holds a value that is neither plain nor numpy; the message names its path.
    """
    write_atomically(path, pack(state))


def read_snapshot(path: Path) -> dict[str, Any]:
    """The dictionary that was written.

    Raises:
        TornCheckpointError: the file is missing.
        ForeignCheckpointError: it is not a snapshot.
    """
    try:
        state = unpack(path.read_bytes())
    except FileNotFoundError:
        raise torn(path, "it is missing") from None
    except ValueError as error:
        raise foreign(path, f"it is {error}") from None
    if not isinstance(state, dict):
        raise foreign(path, f"it holds a {type(state).__name__}, not a dictionary")
    return state


def torn(path: Path, reason: str) -> TornCheckpointError:
    """The one-line error for a checkpoint that is not whole."""
    return TornCheckpointError(
        f"{path} is torn: {reason}; resume from an earlier step (trainer.resume_mode=auto finds the newest whole one)"
    )


def foreign(path: Path, reason: str) -> ForeignCheckpointError:
    """The one-line error for a checkpoint that this recipe did not make."""
    return ForeignCheckpointError(
        f"{path} cannot be resumed by partial rollout: {reason}; "
        f"set another trainer.default_local_dir, or trainer.resume_mode=disable to start over"
    )
