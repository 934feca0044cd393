"""The keys of ``partial_rollout``, with defaults and meaning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from textwrap import fill, indent
from typing import get_args

from recipe.partial_rollout.config.keys import Key, declarations
from recipe.partial_rollout.config.settings import ROOT, Choice, PartialRolloutConfig
from recipe.partial_rollout.tools.command_line import Parser, typed


def default(declared: Key) -> str:
    """The default as a config file would write it."""
    value = declared.default
    if value is None:
        return "null"
    if isinstance(value, bool | StrEnum):
        return str(value).lower()
    return repr(value)


def meaning(declared: Key) -> str:
    """Return the description of a key, followed by that of each of its choices."""
    return " ".join([declared.words, *(f"`{choice}`: {choice.words}." for choice in choices(declared))])


def choices(declared: Key) -> list[Choice]:
    """Return the values that a key allows if it takes one of several words; else an empty list."""
    kinds = get_args(declared.kind) or (declared.kind,)
    return [choice for kind in kinds if isinstance(kind, type) and issubclass(kind, Choice) for choice in kind]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the keys."""
    does = "List the keys of partial_rollout, each with its default and its meaning."
    Parser(typed("keys"), does, [""]).parse_args(arguments)
    for declared in declarations(PartialRolloutConfig):
        # The descriptions are Markdown, for the README: drop links and escapes.
        words = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", meaning(declared)).replace("\\|", "|")
        print(f"{ROOT}.{declared.name}={default(declared)}\n{indent(fill(words, 110), '    ')}")
    return 0
