"""Console script ``partial-rollout``: trains, or runs a tool, with the recipe of this distribution and no other.

It lies outside ``recipe``, where no package of another distribution can hide it.

    partial-rollout train --config-name quickstart_cpu trainer.total_training_steps=4
    partial-rollout tools report outputs/quickstart/noPR outputs/quickstart/PR
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from verl_ext import which_recipe

COMMANDS = {
    "train": "train, with verl's hydra overrides: python -m recipe.partial_rollout.main_ppo",
    "doctor": "say what this machine would do, and what it lacks: python -m recipe.partial_rollout.tools doctor",
    "tools": "plan, read and measure runs: python -m recipe.partial_rollout.tools",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code, or 2 if another recipe of the same name would run in its place."""
    parser = argparse.ArgumentParser(
        prog="partial-rollout",
        description="Partial rollout for verl, from any directory.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<6}  {what}" for name, what in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="its own options: COMMAND --help")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of the command")
    chosen = parser.parse_args(arguments)
    problem = which_recipe.problem()
    if problem is not None:
        print(f"partial-rollout: error: {problem}", file=sys.stderr)
        return 2
    if chosen.command != "train":
        rest = chosen.rest if chosen.command == "tools" else ["doctor", *chosen.rest]
        return importlib.import_module(f"{which_recipe.NAME}.tools.__main__").main(rest)
    # Hydra reads its overrides from there.
    sys.argv[1:] = chosen.rest
    importlib.import_module(f"{which_recipe.NAME}.main_ppo").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
