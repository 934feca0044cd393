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
_WIDTH = 110
"""characters of a line"""


def typed(name: str = "") -> str:
    """Return what a user types to run tool ``name``: the console script's way if that is how this process was started."""
    if Path(sys.argv[0]).name != _COMMAND:
        return f"python -m {HERE} {name}".rstrip()
    between = "" if sys.argv[1:2] == [name] else "tools "
    return f"{_COMMAND} {between}{name}".rstrip()


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps lines of description and examples, and ends the help of an option with its default, if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


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
        description = "\n\n".join(textwrap.fill(part, _WIDTH) for part in (does, more) if part)
        super().__init__(prog=prog, description=description, epilog=epilog, formatter_class=HelpFormatter)
