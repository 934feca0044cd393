"""The keys of ``partial_rollout``, with defaults and meaning; ``--write`` puts them as tables into a Markdown file."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from textwrap import fill, indent
from typing import get_args

from recipe.partial_rollout.config.keys import Declaration, declarations
from recipe.partial_rollout.config.settings import ROOT, Choice, PartialRolloutConfig
from recipe.partial_rollout.tools.command_line import described

FIRST = (
    "enable",
    "placement",
    "overlap",
    "max_staleness",
    "scheduling.policy",
    "slots_per_replica",
    "resume_kv",
    "trust_region",
)
"""keys that a user sets first"""
BEGIN, END = "<!-- {}: python -m recipe.partial_rollout.tools keys --write FILE -->", "<!-- /{} -->"
"""marks of a table; its name is ``keys`` for all, ``first keys`` for those of ``FIRST``, with their first sentence"""


class TableError(ValueError):
    """A file without the two marks of a table."""


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
    return " ".join([declared.key.words, *(f"`{choice}`: {choice.words}." for choice in _choices(declared))])


def _choices(declared: Declaration) -> list[Choice]:
    kinds = get_args(declared.kind) or (declared.kind,)
    return [choice for kind in kinds if isinstance(kind, type) and issubclass(kind, Choice) for choice in kind]


def table(name: str) -> str:
    """The table ``name``, in Markdown."""
    first = name != "keys"
    chosen = {each.name: each for each in declarations(PartialRolloutConfig)}
    rows = []
    for each in [chosen[key] for key in FIRST] if first else chosen.values():
        stands_for = f" ({each.key.null})" if each.key.null else ""
        words = meaning(each)
        if first:
            choices = ", ".join(f"`{choice}`" for choice in _choices(each))
            words = re.split(r"(?<=\.) ", words)[0] + (f" One of {choices}." if choices else "")
        rows.append(f"| `{each.name}` | `{default(each)}`{stands_for} | {words} |")
    return "\n".join([f"| `{ROOT}.` | default | meaning |", "| --- | --- | --- |", *rows])


def with_tables(text: str) -> str:
    """``text`` with the tables between the marks that it has.

    Raises:
        TableError: it has none.
    """
    found = 0
    for name in ("keys", "first keys"):
        begin, end = BEGIN.format(name), END.format(name)
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        made = f"{begin}\n\n{table(name)}\n\n{end}"
        text, count = pattern.subn(made.replace("\\", r"\\"), text)
        found += count
    if not found:
        raise TableError(f"no table of keys: it goes between {BEGIN.format('keys')} and {END.format('keys')}")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the keys, or write the tables; exit code 2 if the file has no place for one."""
    parser = argparse.ArgumentParser(
        **described(
            "keys",
            "List the keys of partial_rollout, each with its default and its meaning.",
            "--write recipe/partial_rollout/README.md",
        )
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="renew the tables of keys in this Markdown file instead"
    )
    options = parser.parse_args(arguments)
    if options.write is None:
        for declared in declarations(PartialRolloutConfig):
            # Markdown's links and escapes are for the README.
            words = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", meaning(declared)).replace("\\|", "|")
            print(f"{ROOT}.{declared.name}={default(declared)}\n{indent(fill(words, 110), '    ')}")
        return 0
    try:
        options.write.write_text(with_tables(options.write.read_text()))
    except TableError as error:
        print(f"error: {options.write}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {options.write}: {error.strerror}", file=sys.stderr)
        return 2
    return 0
