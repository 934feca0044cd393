"""The layout of a tool's ``--help``: one sentence on what it does, more about it, options with defaults, examples."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

HERE = "recipe.partial_rollout.tools"
_COMMAND = "partial-rollout"
"""name of the console script, which verl_ext/command.py implements"""
_WIDTH = 110
"""characters in a line of the description"""


def typed(name: str = "") -> str:
    """Return the command that runs tool ``name``: the console script if it started this process, else ``python -m``."""
    if Path(sys.argv[0]).name != _COMMAND:
        return f"python -m {HERE} {name}".rstrip()
    between = "" if sys.argv[1:2] == [name] else "tools "
    return f"{_COMMAND} {between}{name}".rstrip()


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keep the line breaks of description and examples; end an option's help with its default, if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class Parser(argparse.ArgumentParser):
    """The parser of a command, and of its subcommands.

    Args:
        prog: the command that a user types.
        does: one sentence that says what the command does.
        examples: arguments of example calls; each becomes a line of the help, after ``prog``.
        more: a second paragraph.
    """

    def __init__(self, prog: str, does: str, examples: Sequence[str], more: str = "") -> None:
        epilog = "\n".join(["examples:", *(f"  {prog} {example}" for example in examples)])
        description = "\n\n".join(textwrap.fill(part, _WIDTH) for part in (does, more) if part)
        super().__init__(prog=prog, description=description, epilog=epilog, formatter_class=HelpFormatter)
