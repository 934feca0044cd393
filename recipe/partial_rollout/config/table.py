"""The README's table of keys, made from their declarations; two marks in the README delimit it."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import get_args

from recipe.partial_rollout.config.choices import Choice
from recipe.partial_rollout.config.keys import Declaration, declarations
from recipe.partial_rollout.config.settings import ROOT, PartialRolloutConfig

BEGIN = "<!-- keys: python -m recipe.partial_rollout.tools keys --write FILE -->"
END = "<!-- /keys -->"


class TableError(ValueError):
    """A file without the two marks of the table."""


def default(declared: Declaration) -> str:
    """The default as a config file would write it."""
    value = declared.default
    if value is None:
        return "null"
    if isinstance(value, bool | StrEnum):
        return str(value).lower()
    return repr(value)


def meaning(declared: Declaration) -> str:
    """The words of a key, and of each of its choices."""
    kinds = [kind for kind in get_args(declared.kind) or (declared.kind,) if issubclass(kind, Choice)]
    choices = [f"`{choice}`: {choice.words}." for kind in kinds for choice in kind]
    return " ".join([declared.key.words, *choices])


def table() -> str:
    """Every key, its default and its meaning, in Markdown."""
    rows = []
    for each in declarations(PartialRolloutConfig):
        stands_for = f" ({each.key.null})" if each.key.null else ""
        rows.append(f"| `{each.name}` | `{default(each)}`{stands_for} | {meaning(each)} |")
    return "\n".join([f"| `{ROOT}.` | default | meaning |", "| --- | --- | --- |", *rows])


def with_table(text: str) -> str:
    """``text`` with the table between its marks.

    Raises:
        TableError: it has no marks.
    """
    pattern = re.compile(f"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.DOTALL)
    if not pattern.search(text):
        raise TableError(f"no table of keys: it goes between {BEGIN} and {END}")
    return pattern.sub(lambda marks: f"{marks[1]}\n{table()}\n\n{marks[2]}", text)
