"""The layout of a tool's ``--help``: what the tool does, then how, then options with their defaults, then examples."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

HERE = "recipe.partial_rollout.tools"
_COMMAND = "partial-rollout"
"""the console script of verl_ext/command.py"""


def typed(name: str = "") -> str:
    """What a user types to run tool ``name``: the console script's way if that is how this process was started."""
    if Path(sys.argv[0]).name != _COMMAND:
        return f"python -m {HERE} {name}".rstrip()
    between = "" if sys.argv[1:2] == [name] else "tools "
    return f"{_COMMAND} {between}{name}".rstrip()


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs, keeps lists as they are, and ends the help of an option with its default."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        # The lines of a list are indented.
        return "\n\n".join(part if "\n  " in part else textwrap.fill(part, width) for part in parts)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if not action.option_strings or not action.help or "(default:" in action.help:
            return action.help
        if default is None or default is False or default is argparse.SUPPRESS:
            return action.help
        values = default if isinstance(default, (list, tuple)) else [default]
        return f"{action.help} (default: {' '.join(map(str, values))})"


class Parser(argparse.ArgumentParser):
    """The parser of a command, and of its subcommands.

    Args:
        prog: what a user types.
        does: one sentence.
        examples: arguments of the command, one line each.
        more: a paragraph below the sentence.
    """

    def __init__(self, prog: str, does: str, examples: Sequence[str], more: str = "") -> None:
        epilog = "\n".join(["examples:", *(f"  {prog} {example}" for example in examples)])
        description = f"{does}\n\n{more}".strip()
        super().__init__(prog=prog, description=description, epilog=epilog, formatter_class=HelpFormatter)
