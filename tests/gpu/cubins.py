"""Machine code of other GPUs in a CUDA library: zeroed, so that the library compresses to a part of its size."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = b"\x50\xed\x55\xba"
"""of a fatbin: a header, then entries, one for each architecture"""
_HEADER = struct.Struct("<4sHHQ")
"""magic, version, bytes of the header, bytes of all entries"""
_ENTRY = struct.Struct("<HHIQ12xI")
"""kind, version, bytes of the header, bytes of the code; the architecture (90 for sm_90) is at byte 28"""
_KINDS = (1, 2)
"""PTX and machine code"""


def entries(data: mmap.mmap | bytes) -> Iterator[tuple[int, int, int]]:
    """(architecture, start, end) of the code of each entry of each fatbin."""
    at = data.find(_MAGIC)
    while at >= 0:
        _, _, header, size = _HEADER.unpack_from(data, at)
        entry, end = at + header, at + header + size
        # The magic number can occur in other data.
        while header == _HEADER.size and entry + _ENTRY.size <= min(end, len(data)):
            kind, _, own, code, architecture = _ENTRY.unpack_from(data, entry)
            if kind not in _KINDS or own < _ENTRY.size or entry + own + code > end:
                break
            yield architecture, entry + own, entry + own + code
            entry += own + code
        at = data.find(_MAGIC, at + 1)


def keep_architecture(library: Path, kept: int) -> int:
    """Zero the code of all other architectures in place; returns how many bytes that were."""
    zeroed = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for architecture, start, end in list(entries(data)):
            if architecture != kept:
                data[start:end] = bytes(end - start)
                zeroed += end - start
    return zeroed
