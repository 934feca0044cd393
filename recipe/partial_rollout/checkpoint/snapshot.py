"""The snapshot file: a dictionary of plain values, whole or refused.

Layout: magic (8 bytes), format version (uint32), payload length (uint64), blake2b-256 of version, length and payload,
then the payload (``plain_codec``); integers are big-endian. Nothing is allocated before the length matches the file's,
and nothing is decoded before the checksum matches.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from recipe.partial_rollout.checkpoint.plain_codec import Buffer, pack, unpack

PART = ".part"
"""suffix of a file that is being written"""


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


MAGIC = b"VERL-PR\n"
VERSION = 1

_HEADER = struct.Struct(">8sIQ32s")
_LENGTHS = struct.Struct(">IQ")


class TornCheckpointError(RuntimeError):
    """A checkpoint of partial rollout that is not whole."""


class ForeignCheckpointError(RuntimeError):
    """A checkpoint that this version of the recipe did not make."""


@dataclass(frozen=True, slots=True)
class Written:
    """A snapshot on disk."""

    bytes: int
    seconds: float
    """seconds to encode and write it"""
    checksum: str
    """blake2b-256 of its payload and lengths, hex"""
    blocked_s: float = 0.0
    """part of these seconds in which its owner could not answer"""


def write_snapshot(path: Path, state: dict[str, Any]) -> Written:
    """Write ``state``, atomically.

    Raises:
        UnsaveableError: it holds a value that is neither plain nor numpy; the message names its path.
    """
    start = time.perf_counter()
    chunks = pack(state)
    length = sum(len(chunk) for chunk in chunks)
    digest = _digest(VERSION, length, chunks)
    size = write_atomically(path, [_HEADER.pack(MAGIC, VERSION, length, digest), *chunks])
    return Written(size, time.perf_counter() - start, digest.hex())


def read_snapshot(path: Path) -> dict[str, Any]:
    """The dictionary that was written.

    Raises:
        TornCheckpointError: the file is missing, cut off or changed.
        ForeignCheckpointError: it is not a snapshot, or has another format.
    """
    try:
        with path.open("rb") as file:
            payload = _payload(path, file)
    except FileNotFoundError:
        raise torn(path, "it is missing") from None
    try:
        state = unpack(payload)
    except ValueError as error:
        raise foreign(path, f"its payload is {error}") from None
    if not isinstance(state, dict):
        raise foreign(path, f"it holds a {type(state).__name__}, not a dictionary")
    return state


def _payload(path: Path, file: BinaryIO) -> bytes:
    header = file.read(_HEADER.size)
    if not MAGIC.startswith(header[: len(MAGIC)]):
        raise foreign(path, "it is not a snapshot")
    if len(header) < _HEADER.size:
        raise torn(path, f"it has {len(header)} bytes, fewer than a header")
    _, version, length, digest = _HEADER.unpack(header)
    if version != VERSION:
        raise foreign(path, f"its format is {version}, this version of the recipe reads {VERSION}")
    actual = path.stat().st_size - _HEADER.size
    if actual != length:
        raise torn(path, f"its payload has {actual} bytes of {length}")
    payload = file.read(length)
    if _digest(version, length, [payload]) != digest:
        raise torn(path, "its checksum does not agree with its content")
    return payload


def _digest(version: int, length: int, chunks: Iterable[Buffer]) -> bytes:
    digest = hashlib.blake2b(_LENGTHS.pack(version, length), digest_size=32)
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


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
