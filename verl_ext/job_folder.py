"""A folder in shared memory that belongs to one living process, and that the next job removes once the process is dead."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

_PREFIX = "verl-weights-"


def folder_of(root: Path, job: str) -> Path:
    """Where ``job`` keeps its files."""
    return root / f"{_PREFIX}{job}"


def claim(root: Path, job: str) -> int:
    """Make the job's folder, empty, and remove those of dead jobs.

    Returns:
        A file descriptor that holds the folder's lock. The kernel frees the lock when the process ends, however it ends.
    """
    sweep(root)
    path = folder_of(root, job)
    while True:
        path.mkdir(exist_ok=True)
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        # Held by others only while they sweep.
        fcntl.flock(held, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(held).st_ino == path.stat().st_ino:
                clear(path)
                return held
        os.close(held)


def sweep(root: Path) -> list[Path]:
    """Remove the folders of this user that no living process has claimed; returns them."""
    removed = []
    for path in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                removed.append(path)
            finally:
                os.close(held)
    return removed


def clear(path: Path) -> None:
    """Remove the files of a folder; who has mapped one keeps its memory until it lets go."""
    for file in path.iterdir():
        file.unlink(missing_ok=True)
