"""Tools of partial rollout: plan a run before it starts, read it while and after it runs, measure its parts."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

_HERE = "recipe.partial_rollout.tools"


class Tool(NamedTuple):
    """A command; its module has ``main(arguments) -> exit code``."""

    module: str
    help: str


TOOLS = {
    "report": Tool("report.command", "compare two runs: tables, timeline, curves"),
    "audit": Tool("audit", "check a run's ledger and trace: every prompt trained exactly once, staleness in bounds"),
    "plan": Tool("plan", "forecast speed and staleness of policies and overlaps before anything runs"),
    "drift": Tool("drift", "the steps of finished runs at which the drift warning sets in"),
    "bench": Tool("bench.command", "measure the recipe's parts"),
    "study": Tool("study.command", "train named arms over seeds and compare them: peers (speed), convergence (reward)"),
    "chaos": Tool("chaos.command", "kill a training again and again, resume it, audit it"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one tool; its exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {_HERE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    width = max(map(len, TOOLS))
    parser.epilog = "tools:\n" + "\n".join(f"  {name:<{width}}  {tool.help}" for name, tool in TOOLS.items())
    parser.add_argument("tool", choices=TOOLS, metavar="TOOL", help="its own options: TOOL --help")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of the tool")
    chosen = parser.parse_args(arguments)
    # One tool is imported, not all: a report needs neither torch nor Ray.
    return importlib.import_module(f"{_HERE}.{TOOLS[chosen.tool].module}").main(chosen.rest)


if __name__ == "__main__":
    sys.exit(main())
