"""A folder in shared memory that belongs to one living process, and that the next job removes once the process is dead.

Everybody may write to ``/dev/shm``, and the folder's name can be guessed. So no link is followed, and a folder that another
user made, or may write to, is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path

_PREFIX = "verl-weights-"


def folder_of(root: Path, job: str) -> Path:
    """Where ``job`` keeps its files."""
    return root / f"{_PREFIX}{job}"


def claim(root: Path, job: str) -> int:
    """Make the job's folder, empty, and remove those of dead jobs.

    Returns:
        A file descriptor that holds the folder's lock. The kernel frees the lock when the process ends, however it ends.

    Raises:
        PermissionError: what is there is no folder that only this user can write to.
    """
    sweep(root)
    path = folder_of(root, job)
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with contextlib.suppress(FileNotFoundError):
            held = _open(path)
            # Held by others only while they sweep.
            fcntl.flock(held, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(held), path.lstat()):
                os.fchmod(held, 0o700)
                clear(path)
                return held
            os.close(held)


def check(path: Path) -> None:
    """Raise ``PermissionError`` unless ``path`` is a folder that only this user can write to."""
    os.close(_open(path))


def _open(path: Path) -> int:
    """A file descriptor of the folder ``path``, if it is ours alone."""
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (NotADirectoryError, PermissionError) as error:
        raise _refused(path, "a link, a file, or a folder closed to this user") from error
    status = os.fstat(held)
    if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return held
    os.close(held)
    raise _refused(path, f"owned by user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):03o}")


def _refused(path: Path, found: str) -> PermissionError:
    return PermissionError(
        f"{path}: {found}, so others could replace the weights: remove it, or set "
        "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.shm.root to a folder of your own"
    )


def sweep(root: Path) -> list[Path]:
    """Remove the folders of this user that no living process has claimed; returns them."""
    removed = []
    for path in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            held = _open(path)
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
