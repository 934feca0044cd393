"""The keys of ``partial_rollout``, with defaults and meaning; ``--write`` puts the table into a Markdown file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill, indent

from recipe.partial_rollout.config.keys import declarations
from recipe.partial_rollout.config.settings import ROOT, PartialRolloutConfig
from recipe.partial_rollout.config.table import TableError, default, meaning, with_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the keys, or write the table; exit code 2 where the file has no place for it."""
    parser = argparse.ArgumentParser(prog="python -m recipe.partial_rollout.tools keys", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="renew the table in this Markdown file")
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
        print(f"error: {error}")
        return 2
    return 0
