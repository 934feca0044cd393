"""``python -m recipe.partial_rollout.tools bench COMMAND [options]``; ``--help`` lists the commands and their options."""

from __future__ import annotations

import argparse

from recipe.partial_rollout.tools.bench import distribution, manager, outputs, scale, snapshot


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark; exit code 1 when it misses its bound."""
    parser = argparse.ArgumentParser(prog="python -m recipe.partial_rollout.tools bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    manager.add_arguments(commands.add_parser("manager", help="latency of every PromptsManager verb"))
    snapshot.add_arguments(commands.add_parser("snapshot", help="cost of a checkpoint of the manager"))
    distribution.add_arguments(
        commands.add_parser("distribution", help="does a speculative proposer change what the engine samples?")
    )
    outputs.add_arguments(commands.add_parser("outputs", help="what the engine's outputs cost that nobody reads"))
    scale.add_arguments(commands.add_parser("scale", help="what scheduling costs with many replicas"))
    options = parser.parse_args(arguments)
    return options.run(options)
