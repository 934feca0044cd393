"""The keys of ``partial_rollout``, with defaults and meaning; ``--write`` puts the table into a Markdown file."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill, indent

from recipe.partial_rollout.config.keys import declarations
from recipe.partial_rollout.config.settings import ROOT, PartialRolloutConfig
from recipe.partial_rollout.config.table import TableError, default, meaning, with_table
from recipe.partial_rollout.tools.command_line import described


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the keys, or write the table; exit code 2 if the file has no place for it."""
    parser = argparse.ArgumentParser(
        **described(
            "keys",
            "List the keys of partial_rollout, each with its default and its meaning.",
            "--write recipe/partial_rollout/README.md",
        )
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="renew the table of keys in this Markdown file instead"
    )
    options = parser.parse_args(arguments)
    if options.write is None:
        for declared in declarations(PartialRolloutConfig):
            # Markdown's links and escapes are for the README.
            words = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", meaning(declared)).replace("\\|", "|")
            print(f"{ROOT}.{declared.name}={default(declared)}\n{indent(fill(words, 110), '    ')}")
        return 0
    try:
        options.write.write_text(with_table(options.write.read_text()))
    except (TableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
