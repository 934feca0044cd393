"""Tools of partial rollout: plan a run, read it while and after it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from recipe.partial_rollout.tools.command_line import HERE, typed
from verl_ext.guard import enter_recipe


class Tool(NamedTuple):
    """A command; its module has ``main(arguments) -> exit code``."""

    module: str
    help: str


TOOLS = {
    "report": Tool(
        "report.command", "compare runs, also while they go on: interactive timeline, tables, training curves"
    ),
    "audit": Tool(
        "audit", "check that a run trained every prompt exactly once, within the staleness bound, with all its samples"
    ),
    "plan": Tool("plan", "forecast whether partial rollout is worth it for a job, and at which overlap"),
    "data": Tool("data.command", "write GSM8K, DAPO-Math-17k, AIME 2024 and tasks of reasoning-gym in verl's schema"),
    "model": Tool("model", "write a real language model for verl, from a package instead of a hub"),
    "check": Tool("check.command", "say what this machine lacks for a run"),
    "keys": Tool("keys", "list the keys of partial_rollout: default and meaning"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one tool; its exit code."""
    parser = argparse.ArgumentParser(
        prog=typed(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    width = max(map(len, TOOLS))
    parser.epilog = "tools:\n" + "\n".join(f"  {name:<{width}}  {tool.help}" for name, tool in TOOLS.items())
    parser.epilog += f"\n\nexamples:\n  {parser.prog} report --help\n  {parser.prog} audit outputs/quickstart/PR"
    parser.add_argument(
        "tool", choices=TOOLS, metavar="TOOL", help="one of the tools below; TOOL --help shows its options"
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of that tool")
    chosen = parser.parse_args(arguments)
    # Before any tool is imported: the tool `check` imports verl and inspects its patches.
    enter_recipe()
    try:
        # One tool is imported, not all: a report needs neither torch nor Ray.
        code = importlib.import_module(f"{HERE}.{TOOLS[chosen.tool].module}").main(chosen.rest)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted. Python flushes once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
