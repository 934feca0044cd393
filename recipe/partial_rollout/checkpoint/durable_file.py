"""Files that are whole or absent after a crash or a power cut."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

PART = ".part"
"""suffix of a file that is being written"""

Buffer = bytes | memoryview


def write_atomically(path: Path, chunks: Iterable[Buffer]) -> int:
    """Write ``chunks`` to ``path`` under a temporary name, fsync, rename, fsync the directory; returns the bytes."""
    part = path.with_name(path.name + PART)
    with part.open("wb") as file:
        size = sum(file.write(chunk) for chunk in chunks)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    sync(path.parent)
    return size


def sync(path: Path) -> None:
    """Sync file or directory ``path`` to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """blake2b of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
