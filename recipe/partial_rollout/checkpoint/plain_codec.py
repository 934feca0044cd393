"""Plain Python and numpy values as msgpack: what is read back can only be data, never code.

Extension types cover arrays (dtype, shape, bytes), object arrays and tuples (by elements) and numpy scalars. A large
array is a list of its head (dtype, shape) and its bytes in pieces, because no msgpack value has 4 GiB. A value of any
other type is refused with its path; nothing is pickled or silently turned into text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

Buffer = bytes | memoryview

_ARRAY, _SCALAR, _OBJECTS, _TUPLE, _HEAD = 1, 2, 3, 4, 5
_DTYPE = re.compile(r"\|b1|\|[iu]1|<[iu][248]|<f[248]|<U[0-9]{1,6}")
_ALLOWED = "plain values, lists, tuples, dictionaries keyed by str or int, and numpy arrays of bool, int, float, str"
_EXT_LIMIT = 2**32 - 1
PIECE_BYTES = 2**30
"""an array of more bytes is packed in pieces of as many"""
_ERRORS = "surrogatepass"
"""a prompt may hold a lone surrogate, which strict UTF-8 cannot"""


class UnsaveableError(ValueError):
    """A value cannot be saved; the message names its path."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []

    def within(self, step: str) -> UnsaveableError:
        """The same error, seen from one container further out."""
        self.path.insert(0, step)
        self.args = (f"{''.join(self.path).removeprefix('.')}: {self.reason}",)
        return self


def pack(value: Any) -> list[Buffer]:
    """msgpack of ``value`` in chunks; the memory of large arrays is shared, not copied.

    Raises:
        UnsaveableError: such as ``reserve[3].row.image: PIL.Image.Image cannot be saved ...``.
    """
    encoder = _Encoder()
    encoder.add(value)
    return encoder.chunks()


class _Encoder:
    def __init__(self) -> None:
        self._packer = msgpack.Packer(autoreset=False, unicode_errors=_ERRORS)
        self._chunks: list[Buffer] = []

    def chunks(self) -> list[Buffer]:
        self._flush()
        return self._chunks

    def add(self, value: Any) -> None:
        kind = type(value)
        if value is None or kind in (bool, float, str, bytes):
            self._packer.pack(value)
        elif kind is int:
            if not -(2**63) <= value < 2**64:
                raise UnsaveableError(f"an integer of {value.bit_length()} bits cannot be saved: at most 64")
            self._packer.pack(value)
        elif kind is list:
            self._packer.pack_array_header(len(value))
            self._add_all(value)
        elif kind is dict:
            self._add_dict(value)
        elif kind is tuple:
            self._add_nested(_TUPLE, None, value)
        elif kind is np.ndarray and value.dtype == object:
            self._add_nested(_OBJECTS, list(value.shape), value.ravel().tolist())
        elif kind is np.ndarray:
            self._add_array(_ARRAY, value)
        elif isinstance(value, np.generic):
            self._add_array(_SCALAR, np.asarray(value))
        else:
            raise UnsaveableError(f"{kind.__module__}.{kind.__qualname__} cannot be saved: only {_ALLOWED} can")

    def _add_all(self, values: Sequence[Any]) -> None:
        index = 0
        try:
            for value in values:
                self.add(value)
                index += 1
        except UnsaveableError as error:
            raise error.within(f"[{index}]") from None

    def _add_dict(self, value: dict[Any, Any]) -> None:
        self._packer.pack_map_header(len(value))
        key: Any = None
        try:
            for key, item in value.items():
                if type(key) not in (str, int):
                    raise UnsaveableError(
                        f"a key of type {type(key).__qualname__} cannot be saved: only {_ALLOWED} can"
                    )
                self._packer.pack(key)
                self.add(item)
        except UnsaveableError as error:
            raise error.within(f".{key}") from None

    def _add_nested(self, code: int, head: Any, values: Sequence[Any]) -> None:
        inner = _Encoder()
        inner._packer.pack(head)
        inner._packer.pack_array_header(len(values))
        inner._add_all(values)
        self._add_ext(code, inner.chunks())

    def _add_array(self, code: int, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
        if not _DTYPE.fullmatch(array.dtype.str):
            raise UnsaveableError(f"an array of dtype {array.dtype} cannot be saved: only {_ALLOWED} can")
        head = pack([array.dtype.str, list(array.shape)])
        raw = array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
        if code == _SCALAR or len(raw) <= PIECE_BYTES:
            self._add_ext(code, [*head, raw])
            return
        pieces = [raw[start : start + PIECE_BYTES] for start in range(0, len(raw), PIECE_BYTES)]
        self._packer.pack_array_header(1 + len(pieces))
        self._add_ext(_HEAD, head)
        for piece in pieces:
            # bin 32 of the msgpack specification: type byte 0xc6, length.
            self._chunks += [b"\xc6" + len(piece).to_bytes(4, "big"), piece]

    def _add_ext(self, code: int, parts: list[Buffer]) -> None:
        size = sum(len(part) for part in parts)
        if size > _EXT_LIMIT:
            raise UnsaveableError(
                f"{size} bytes in one tuple or array of objects cannot be saved: at most {_EXT_LIMIT}"
            )
        self._flush()
        # ext 32 of the msgpack specification: type byte 0xc9, length, extension type.
        self._chunks += [b"\xc9" + size.to_bytes(4, "big") + bytes([code]), *parts]

    def _flush(self) -> None:
        if waiting := self._packer.bytes():
            self._chunks.append(waiting)
            self._packer.reset()


def unpack(data: Buffer) -> Any:
    """The value that was packed.

    Raises:
        ValueError: ``data`` is not what ``pack`` makes.
    """
    try:
        return _unpack(data)
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"not a packed value: {type(error).__name__}: {error}") from error


def _unpack(data: Buffer) -> Any:
    return msgpack.unpackb(data, ext_hook=_extension, list_hook=_listed, strict_map_key=False, unicode_errors=_ERRORS)


class _Head(NamedTuple):
    """Dtype and shape of an array whose pieces follow."""

    dtype: str
    shape: list[int]


def _listed(values: list[Any]) -> Any:
    """A list, or the array that it holds in pieces."""
    return _array(*values[0], values[1:]) if values and type(values[0]) is _Head else values


def _unpack_two(data: Buffer) -> tuple[Any, Buffer]:
    """The first value of ``data`` and the bytes behind it."""
    unpacker = msgpack.Unpacker(ext_hook=_extension, strict_map_key=False, max_buffer_size=len(data))
    unpacker.feed(data)
    return unpacker.unpack(), memoryview(data)[unpacker.tell() :]


def _extension(code: int, data: bytes) -> Any:
    if code in (_ARRAY, _SCALAR):
        # The head is short; feeding all of a large array to find its end would copy it.
        start = memoryview(data)[:1024]
        (dtype, shape), rest = _unpack_two(start)
        array = _array(dtype, shape, [memoryview(data)[len(start) - len(rest) :]])
        return array[()] if code == _SCALAR else array
    if code in (_OBJECTS, _TUPLE):
        head, rest = _unpack_two(data)
        values = _unpack(rest)
        return tuple(values) if code == _TUPLE else _objects(head, values)
    if code == _HEAD:
        return _Head(*_unpack(data))
    raise ValueError(f"extension type {code} is unknown")


def _array(dtype: str, shape: list[int], pieces: Sequence[Buffer]) -> np.ndarray:
    if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
        raise ValueError(f"dtype {dtype!r} is not allowed")
    size = sum(map(len, pieces))
    if any(side < 0 for side in shape) or math.prod(shape) * np.dtype(dtype).itemsize != size:
        raise ValueError(f"an array of {dtype} {shape} in {size} bytes")
    if not size:
        return np.empty(shape, dtype)
    # A copy, because torch needs writable memory.
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces]).view(dtype).reshape(shape)


def _objects(shape: list[int], values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array.reshape(shape)
