"""How a key is declared, checked and listed.

A section is a frozen dataclass whose fields are made with ``key``, or with ``section`` for the sections inside it. The
declaration is the only place that knows a key: hydra gets its default from it (``defaults_of``), a user's value is
checked against it (``read``), and the README's table is made from it (``declarations``).

OmegaConf could check types itself, but it accepts 0 as a flag, ``"3"`` as an integer and an enum's Python name as its
value, and its errors take three lines. So hydra gets plain values, and ``read`` does the checking.

>>> @dataclass(frozen=True)
... class Tea:
...     minutes: float = key(3.5, "How long it brews.", above=0)
>>> defaults_of(Tea), read(Tea, {"minutes": 4}, "tea")
({'minutes': 3.5}, {'minutes': 4.0})
>>> read(Tea, {"minutes": -1}, "tea")
Traceback (most recent call last):
recipe.partial_rollout.config.keys.ConfigError: tea.minutes=-1: a number above 0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from recipe.partial_rollout.waits import one_line


class ConfigError(ValueError):
    """A user's mistake in the configuration, in one line: the key, its value, what is allowed."""


def fail(key: str, value: object, allowed: str) -> ConfigError:
    """The error for ``key``."""
    return ConfigError(f"{key}={value}: {allowed}")


@contextmanager
def refusing(key: str, value: object, allowed: str, errors: type[Exception] | tuple[type[Exception], ...] = Exception):
    """While entered, one of ``errors`` becomes the error for ``key``, which tells it in brackets."""
    try:
        yield
    except errors as error:
        # hydra wraps what a class raises; its cause says why.
        raise fail(key, value, f"{allowed} ({one_line(error.__cause__ or error)})") from error


_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""YAML 1.1's words; hydra's command line knows true and false only, and hands the others over as strings"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key's declaration."""

    name: str = ""
    """dotted, such as ``deadlines.stall_s``; what ends so is in seconds"""
    kind: Any = None
    """type, as annotated"""
    default: Any
    words: str
    """its meaning, for the README's table"""
    at_least: float | None = None
    above: float | None = None
    at_most: float = math.inf
    word: str | float | None = None
    """a word, or infinity, that the key accepts besides numbers"""
    null: str | None = None
    """what null stands for, if the settings fill it in; for the README's table"""

    def allowed(self, kind: Any, *, nullable: bool) -> str:
        """The values that it may have, each a ``kind``, in words."""
        if get_origin(kind) is tuple:
            words = "[low, high], each " + self.allowed(get_args(kind)[0], nullable=False)
        elif issubclass(kind, StrEnum):
            words = "one of " + ", ".join(kind)
        else:
            number = "an integer" if kind is int else "seconds" if self.name.endswith("_s") else "a number"
            least = f"above {self.above:g}" if self.above is not None else f"of at least {self.at_least:g}"
            words = f"{number} {least}" + (f" and at most {self.at_most:g}" if self.at_most < math.inf else "")
        return ", or ".join([words, *([str(self.word)] if self.word else []), *(["null"] if nullable else [])])

    def within(self, number: float) -> bool:
        """Whether a number is in the limits."""
        high_enough = number > self.above if self.above is not None else number >= (self.at_least or 0)
        return math.isfinite(number) and high_enough and number <= self.at_most


_PART = "part"
"""in the metadata of a section's field: its ``Key``, or the section inside"""


def key(default: Any, words: str, **limits: Any) -> Any:
    """A field of a section: a key with its default and meaning; ``limits`` are ``Key``'s."""
    return field(default=default, metadata={_PART: Key(default=default, words=words, **limits)})


def section(kind: type) -> Any:
    """A field of a section: the keys of section ``kind``, under the field's name."""
    return field(default_factory=kind, metadata={_PART: kind})


def _parts(kind: type) -> Iterator[tuple[str, Key | type]]:
    """Keys and sections of ``kind``, by name; fields not made by ``key`` or ``section`` are left out."""
    hints = get_type_hints(kind)
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
    """The values of section ``kind`` in ``node``, which has no other keys; a key that it lacks has its default.

    Args:
        at: path of the section, for errors.

    Raises:
        ConfigError: in one line.
    """
    if not isinstance(node, Mapping):
        raise fail(at, node, "its keys: " + ", ".join(name for name, _ in _parts(kind)))
    names = {declared.name for declared in declarations(kind)}
    sections = {name.rpartition(".")[0] for name in names}
    for name, value in leaves(node):
        # A section that is no mapping is refused below.
        if name not in names | sections:
            raise unknown(kind, name, value, at)
    values = {}
    for name, part in _parts(kind):
        path = f"{at}.{name}"
        if isinstance(part, Key):
            values[name] = checked(path, node.get(name, part.default), part)
        else:
            values[name] = part(**read(part, node.get(name, {}), path))
    return values


def checked(path: str, value: Any, declared: Key) -> Any:
    """``value`` as a value of key ``declared``.

    Raises:
        ConfigError: in one line.
    """
    kinds = get_args(declared.kind) if isinstance(declared.kind, UnionType) else (declared.kind,)
    nullable = NoneType in kinds or declared.null is not None
    (plain,) = (each for each in kinds if each is not NoneType)
    if (value is None and nullable) or (declared.word is not None and value == declared.word):
        return value
    if plain is bool:
        flag = value if isinstance(value, bool) else _FLAGS.get(str(value).lower())
        if flag is None:
            raise fail(path, value, "true or false")
        return flag
    refused = fail(path, value, declared.allowed(plain, nullable=nullable))
    given = [*value] if isinstance(value, Sequence) and not isinstance(value, str) else value
    try:
        found: Any = msgspec.convert(given, plain)
    except msgspec.ValidationError:
        raise refused from None
    if isinstance(found, str):
        return found
    numbers: Any = found if isinstance(found, tuple) else [found]
    if not all(map(declared.within, numbers)):
        raise refused
    return found


# -- keys that do not exist --------------------------------------------------------------------------------------------


def unknown(kind: type, name: str, value: object, at: str) -> ConfigError:
    """The error for a key that section ``kind``, at path ``at``, does not have."""
    near = nearest(name, [declared.name for declared in declarations(kind)])
    hint = f"did you mean {at}.{near}?" if near else "python -m recipe.partial_rollout.tools keys lists all"
    return fail(f"{at}.{name}", value, f"no such key; {hint}")


def leaves(node: Mapping[Any, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names in a nested mapping, with their values."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", value


def nearest(name: str, names: list[str]) -> str | None:
    """The name that the user probably meant: the same key of another section, one that begins alike, or is spelt alike."""
    last, beginning = name.rpartition(".")[2], name.rpartition("_")[0]
    same = [each for each in names if each.rpartition(".")[2] == last]
    alike = [each for each in names if beginning and each.startswith(f"{beginning}_")]
    if same:
        return max(same, key=lambda each: len({*each.split(".")} & {*name.split(".")}))
    return next(iter(get_close_matches(name, alike, 1, 0) or get_close_matches(name, names, 1, 0.5)), None)
