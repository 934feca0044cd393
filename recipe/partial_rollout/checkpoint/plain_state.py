"""Packs plain Python and numpy values as msgpack: reading them back can only give data, never run code.

Extension types cover arrays (dtype, shape, bytes), numpy scalars, object arrays and tuples (by elements). A value of
any other type is refused with its path; nothing is pickled or silently turned into text. Values come back with their
types, except that bytearrays and memoryviews come back as bytes.
"""

from __future__ import annotations

import re
from typing import Any

import msgpack
import numpy as np

_ARRAY, _SCALAR, _OBJECTS, _TUPLE = 1, 2, 3, 4
_DTYPE = re.compile(r"\|b1|\|[iu]1|<[iu][248]|<f[248]|<U[0-9]{1,6}")
_ALLOWED = (
    "plain values (integers of at most 64 bits), lists, tuples, dictionaries, numpy arrays of bool, int, float, str"
)
_ERRORS = "surrogatepass"
"""UTF-8 error handler for texts with a lone surrogate, which strict UTF-8 cannot encode; a prompt may have one"""


class UnsaveableError(ValueError):
    """A value cannot be saved.

    The message names its path, as in ``reserve[3].row.image: PIL.Image.Image cannot ...``. It has no path if msgpack
    itself fails, because the whole value is too large or nested too deep.
    """


def pack(value: Any, name: str = "") -> bytes:
    """``value`` as msgpack.

    Args:
        name: of ``value``, with which the error begins.

    Raises:
        UnsaveableError: it holds a value that is neither plain nor numpy.
    """
    try:
        return _packed(value)
    except UnsaveableError:
        words = _refusal(value)
    except (ValueError, RecursionError) as error:
        # msgpack's own, without a path: more than 4 GiB in one value, or too deep, as a value that holds itself.
        words = f": it cannot be saved: {error}"
    raise UnsaveableError(f"{name}{words}".removeprefix(".").removeprefix(": "))


def _packed(value: Any) -> bytes:
    # Strict: msgpack would write a tuple, or a subclass of a plain type, as that plain type.
    packed: Any = msgpack.packb(value, default=_extended, strict_types=True, unicode_errors=_ERRORS)
    return packed


def _extended(value: Any) -> msgpack.ExtType:
    """Pack a tuple or a numpy value, for which msgpack has no type.

    Raises:
        UnsaveableError: the value has another type or a dtype that is not allowed, or holds such a value.
    """
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _packed(list(value)))
    if kind is np.ndarray and value.dtype == object:
        return msgpack.ExtType(_OBJECTS, _packed([list(value.shape), value.ravel().tolist()]))
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        dtype = array.dtype.newbyteorder("<")
        if not _DTYPE.fullmatch(dtype.str):
            raise UnsaveableError(f"an array of dtype {dtype} cannot be saved: only {_ALLOWED} can")
        head = " ".join([dtype.str, *map(str, array.shape)])
        return msgpack.ExtType(
            _ARRAY if kind is np.ndarray else _SCALAR, head.encode() + b"\n" + array.astype(dtype, copy=False).tobytes()
        )
    raise UnsaveableError(f"{kind.__module__}.{kind.__qualname__} cannot be saved: only {_ALLOWED} can")


def _refusal(value: Any) -> str:
    """Return path and reason of the first value in ``value`` that is refused."""
    kind, inside = type(value), ()
    if kind is dict:
        inside = ((f".{key}", each) for key, item in value.items() for each in (key, item))
    elif kind in (list, tuple) or (kind is np.ndarray and value.dtype == object):
        inside = ((f"[{i}]", each) for i, each in enumerate(value if kind is not np.ndarray else value.ravel()))
    for step, each in inside:
        try:
            _packed(each)
        except UnsaveableError:
            return step + _refusal(each)
    try:
        _extended(value)
    except UnsaveableError as error:
        return f": {error}"
    raise AssertionError(f"{kind} can be packed")


def unpack(data: bytes) -> Any:
    """Return the packed value; its arrays are writable, as torch needs them. Raise if ``data`` is not of ``pack``."""
    return msgpack.unpackb(data, ext_hook=_extension, strict_map_key=False, unicode_errors=_ERRORS)


def _extension(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(unpack(data))
    if code == _OBJECTS:
        shape, values = unpack(data)
        return np.fromiter(values, object, len(values)).reshape(shape)
    if code not in (_ARRAY, _SCALAR):
        raise ValueError(f"extension type {code} is unknown")
    head, _, raw = data.partition(b"\n")
    dtype, *shape = head.decode().split()
    if not _DTYPE.fullmatch(dtype):
        words = f"the checkpoint holds an array of dtype {dtype!r}, which the recipe never saves"
        raise ValueError(f"{words}: resume from another checkpoint")
    array = np.ndarray([int(side) for side in shape], dtype, bytearray(raw))
    return array if code == _ARRAY else array[()]
