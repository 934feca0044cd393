"""``python -m tests.bench distribution [options]``; exit code 1 when it misses its bound."""

from __future__ import annotations

import argparse
import sys

from recipe.partial_rollout.tools.command_line import described
from tests.bench import distribution

HERE = "tests.bench"


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark."""
    example = "--method ngram"
    parser = argparse.ArgumentParser(
        **described("", "Measure one part of the recipe.", f"distribution {example}", door=HERE)
    )
    commands = parser.add_subparsers(required=True, metavar="NAME", title="benchmarks")
    does = "Test whether a proposer changes what the engine samples."
    texts = described("distribution", does, example, more=distribution.BOUND, door=HERE)
    command = commands.add_parser("distribution", help=does, **texts)
    distribution.add_arguments(command)
    command.set_defaults(run=distribution.run)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
