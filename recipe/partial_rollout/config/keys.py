"""Declares, checks and lists the keys of ``partial_rollout``.

A section is a frozen dataclass whose fields are made with ``key``, or with ``section`` for the sections inside it. The
declaration is the only place that knows a key: hydra gets its default from it (``defaults_of``), a user's value is
checked against it (``read``), and the README's table is made from it (``declarations``).

OmegaConf could check types itself, but it accepts 0 as a flag, ``"3"`` as an integer and an enum's Python name as its
value, and its errors take three lines. So hydra gets plain values, and ``read`` has msgspec check them.

>>> @dataclass(frozen=True)
... class Tea:
...     minutes: Positive = key(3.5, "How long it brews.")
>>> defaults_of(Tea), read(Tea, {"minutes": 4}, "tea")
({'minutes': 3.5}, {'minutes': 4.0})
>>> read(Tea, {"minutes": -1}, "tea")
Traceback (most recent call last):
recipe.partial_rollout.config.keys.ConfigError: tea.minutes=-1: a number above 0
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, inspect
from msgspec.inspect import type_info

from recipe.partial_rollout.waits import one_line


class ConfigError(ValueError):
    """A user's mistake in the configuration, in one line: the key, its value, what is allowed."""


def fail(key: str, value: object, allowed: str) -> ConfigError:
    """Make the error for ``key``."""
    return ConfigError(f"{key}={value}: {allowed}")


@contextmanager
def refusing(
    key: str,
    value: object,
    allowed: str,
    errors: type[BaseException] | tuple[type[BaseException], ...] = (Exception, SystemExit),
):
    """Context manager: turn an error of type ``errors`` into the ``ConfigError`` for ``key``, and quote it in brackets.

    A module may exit while it is imported, as by an ``argparse`` that is not behind ``__main__``.
    """
    try:
        yield
    except errors as error:
        # hydra wraps what a class raises; its cause says why.
        raise fail(key, value, f"{allowed} ({one_line(error.__cause__ or error)})") from error


FINITE = sys.float_info.max
"""upper limit of a number that may not be infinite; messages leave it out"""
Positive = Annotated[float, Meta(gt=0, le=FINITE)]
Whole = Annotated[int, Meta(ge=0)]
FromOne = Annotated[int, Meta(ge=1)]
"""``Positive``: above 0 and finite; ``Whole``: an integer from 0; ``FromOne``: an integer from 1"""
ImportPath = Annotated[str, Meta(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)+$")]
"""a module and a name in it, joined by a dot"""
LISTED = "; python -m recipe.partial_rollout.tools keys lists all"
TEXT = " (this is text; to read a number from an environment variable, write ${oc.decode:${oc.env:NAME}})"
"""hint in the error for a value that is text but looks like a number"""
_NUMBER = re.compile(r"[-+\d.]+(e-?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key's declaration."""

    name: str = ""
    """dotted, such as ``deadlines.stall_s``; the ending ``_s`` says seconds"""
    kind: Any = None
    """type, as annotated; its limits are msgspec's"""
    default: Any
    words: str
    """its meaning, for the README's table"""
    null: str | None = None
    """words for null in the README's table, if the settings replace null by a value; None: ``kind`` says whether null
    is allowed"""


_PART = "part"
"""name in a dataclass field's metadata of its ``Key``, or of the class of the section that it holds"""


def key(default: Any, words: str, null: str | None = None) -> Any:
    """Declare a key: return a dataclass field.

    ``words``: the key's meaning; ``null``: words for null, as in ``Key``.
    """
    return field(default=default, metadata={_PART: Key(default=default, words=words, null=null)})


def section(kind: type) -> Any:
    """Declare a section in a section: return a dataclass field that holds the keys of ``kind``."""
    return field(default_factory=kind, metadata={_PART: kind})


def _parts(kind: type) -> Iterator[tuple[str, Key | type]]:
    """Keys and sections of ``kind``, by name; fields not made by ``key`` or ``section`` are left out."""
    hints = get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        part = item.metadata.get(_PART)
        if part is not None:
            yield item.name, replace(part, name=item.name, kind=hints[item.name]) if isinstance(part, Key) else part


def declarations(kind: type, at: str = "") -> Iterator[Key]:
    """Every key of section ``kind``, and of the sections inside it, in the order of declaration."""
    for name, part in _parts(kind):
        if isinstance(part, Key):
            yield replace(part, name=at + name)
        else:
            yield from declarations(part, f"{at}{name}.")


def defaults_of(kind: type) -> dict[str, Any]:
    """The defaults of section ``kind`` as plain values, for hydra."""
    return {
        name: msgspec.to_builtins(part.default) if isinstance(part, Key) else defaults_of(part)
        for name, part in _parts(kind)
    }


# -- a user's values ---------------------------------------------------------------------------------------------------


def read(kind: type, node: Any, at: str) -> dict[str, Any]:
    """Check ``node`` as section ``kind``; return the section's values by name, with defaults for keys that it lacks.

    Args:
        at: path of the section, for errors.

    Raises:
        ConfigError: for the first key that does not exist, or value that is not allowed.
    """
    if not isinstance(node, Mapping):
        raise fail(at, node, "a section with the keys " + ", ".join(name for name, _ in _parts(kind)))
    names = [declared.name for declared in declarations(kind)]
    sections = {name.rpartition(".")[0] for name in names}
    for name, value in leaves(node):
        # A section that is no mapping is refused below.
        if name not in {*names, *sections}:
            raise fail(f"{at}.{name}", value, no_such(name, names, f"{at}.", LISTED))
    values = {}
    for name, part in _parts(kind):
        path = f"{at}.{name}"
        if isinstance(part, Key):
            values[name] = checked(path, node.get(name, part.default), part)
        else:
            values[name] = part(**read(part, node.get(name, {}), path))
    return values


def checked(path: str, value: Any, declared: Key) -> Any:
    """Convert ``value`` to the type of ``declared`` and return it.

    Raises:
        ConfigError: in one line.
    """
    if value is None and declared.null is not None:
        return None
    # msgspec does not take OmegaConf's ListConfig for a list.
    given = [*value] if isinstance(value, Sequence) and not isinstance(value, str) else value
    # One after the other: msgspec refuses a union of an enum's words and other text.
    kinds = get_args(declared.kind) if get_origin(declared.kind) in (Union, UnionType) else (declared.kind,)
    for kind in kinds:
        with suppress(msgspec.ValidationError):
            return msgspec.convert(given, kind)
    number = "seconds" if path.endswith("_s") else "a number"
    words = ", or ".join(allowed(type_info(kind), number) for kind in kinds)
    words += ", or null" if declared.null is not None else ""
    raise fail(path, value, words + (TEXT if isinstance(value, str) and _NUMBER.fullmatch(value) else ""))


def allowed(kind: inspect.Type, number: str = "a number") -> str:
    """Describe in words the values that ``kind`` allows; ``number`` is the word for a float, such as ``seconds``."""
    match kind:
        case inspect.NoneType():
            return "null"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "the import path of a function, such as my_package.my_module.my_order" if kind.pattern else "text"
        case inspect.EnumType():
            return "one of " + ", ".join(map(str, kind.cls))
        case inspect.LiteralType():
            return "one of " + ", ".join(map(str, kind.values))
        case inspect.ListType():
            return "a list of " + allowed(kind.item_type)
        case inspect.TupleType():
            return "[low, high], each " + allowed(kind.item_types[0], number)
        case inspect.IntType() | inspect.FloatType():
            words = number if isinstance(kind, inspect.FloatType) else "an integer"
            for limit, bound in (("above", kind.gt), ("of at least", kind.ge), ("and at most", kind.le)):
                words += "" if bound in (None, FINITE) else f" {limit} {bound:.10g}"
            return words
    raise TypeError(f"keys of type {kind} are not supported: describe their values in config.keys.allowed")


# -- keys that do not exist --------------------------------------------------------------------------------------------


def no_such(name: str, names: list[str], at: str, otherwise: str) -> str:
    """Describe that ``name`` is none of ``names``, all relative to path ``at``, which ends with a dot.

    The user probably meant the same key of another section, or one that is spelt alike.
    """
    near = [each for each in names if each.rpartition(".")[2] == name.rpartition(".")[2]]
    near.sort(key=lambda each: len({*each.split(".")} & {*name.split(".")}), reverse=True)
    near += get_close_matches(name, names, 1, 0.5)
    return "no such key" + (f"; did you mean {at}{near[0]}?" if near else otherwise)


def leaves(node: Mapping[Any, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names in a nested mapping, with their values."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value
