"""A file of named tensors that is written one tensor at a time and mapped by its readers.

It appears under its name only when it is whole. Layout: the bytes of each tensor, at a multiple of 64; an index, as JSON;
the length of the index in 8 bytes. (safetensors puts its index first, so it needs all tensors at once. Here the trainer
gathers one after the other and never holds the whole model.)
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

_ALIGNMENT = 64
_LENGTH_BYTES = 8

Named = tuple[str, torch.Tensor]


def write(path: Path, tensors: Iterable[Named]) -> int:
    """Write ``tensors``, of any device, shape and dtype, and replace ``path`` by the result; returns its bytes.

    Only the owner may read the file.

    Raises:
        OSError: there is no room. Then nothing is left of the new file, and ``path`` is as it was.
    """
    part = path.with_name(f"{path.name}.part")
    index = []
    part.unlink(missing_ok=True)
    try:
        with open(part, "xb", opener=_private) as file:
            for name, tensor in tensors:
                at = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                flat = tensor.detach().reshape(-1).to("cpu")
                index.append((name, str(flat.dtype).removeprefix("torch."), list(tensor.shape), at))
                file.write(flat.view(torch.uint8).numpy().data)
            words = json.dumps(index).encode()
            file.write(words + len(words).to_bytes(_LENGTH_BYTES, "little"))
            size = file.tell()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return size


def read(path: Path) -> Iterator[Named]:
    """The tensors of the file, in the order of their writing, on the CPU and without a copy.

    They stay as they are when the file is removed or replaced, and writing to one changes neither the file nor what
    other processes read.
    """
    with open(path, "rb", opener=_private) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    end = len(mapped) - _LENGTH_BYTES
    length = int.from_bytes(mapped[end:], "little")
    for name, dtype, shape, at in json.loads(mapped[end - length : end]):
        kind, count = getattr(torch, dtype), math.prod(shape)
        flat = torch.frombuffer(mapped, dtype=kind, count=count, offset=at) if count else torch.empty(0, dtype=kind)
        yield name, flat.view(shape)


def _private(path: str, flags: int) -> int:
    """Open for the owner alone, and follow no link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
