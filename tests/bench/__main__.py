"""``python -m tests.bench NAME [options]``: runs one benchmark."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

from recipe.partial_rollout.tools.command_line import described
from tests.bench import distribution, hold, manager, scale, snapshot

HERE = "tests.bench"


class Benchmark(NamedTuple):
    """A command; ``add_arguments`` also sets the parser's default ``run``, which takes the options."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    does: str
    example: str
    more: str = ""


BENCHMARKS = {
    "manager": Benchmark(
        manager.add_arguments,
        "Time every verb of the prompts manager with many samples in flight.",
        "--samples 20000 --workers 16",
        "One process, no Ray. Exit code 1 if the p99 of a verb is over its bound.",
    ),
    "snapshot": Benchmark(
        snapshot.add_arguments,
        "Time a checkpoint of the prompts manager: capture, write and load.",
        "--groups 128 --tokens 1024",
        "One process, no Ray. Exit code 1 if saving takes more than 5% of a step.",
    ),
    "distribution": Benchmark(
        distribution.add_arguments,
        "Test whether a speculative proposer changes what the engine samples.",
        "--method ngram --prompts 16 --samples 16",
        "Samples the same prompts with and without it and compares the two by a permutation test. "
        "Exit code 1 if the distributions differ.",
    ),
    "hold": Benchmark(
        hold.add_arguments,
        "Time holds of an engine: until it stands still, and until it decodes again.",
        "--running 64 --repeats 10",
        "With a kept and with an emptied KV cache, in turns. Exit code 1 if hold and resumption take more than 60 ms "
        "beyond a step of the engine.",
    ),
    "scale": Benchmark(
        scale.add_arguments,
        "Measure what scheduling costs with up to 1,024 replicas.",
        "--replicas 1 64 --rounds 1",
        "The real manager actor and workers drive replicas that follow an engine curve. Overhead is the share of a "
        "round's slot time lost to scheduling: from the start of the round until a slot decodes, and from the decision to "
        "interrupt until the engines are quiet. Exit code 1 if it is over its bound.",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark; exit code 1 when it misses its bound."""
    parser = argparse.ArgumentParser(
        **described(
            "",
            "Measure one part of the recipe.",
            "manager --samples 20000",
            "scale --replicas 1 64",
            door=HERE,
        )
    )
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME", title="benchmarks")
    for name, benchmark in BENCHMARKS.items():
        texts = described(name, benchmark.does, benchmark.example, more=benchmark.more, door=HERE)
        benchmark.add_arguments(commands.add_parser(name, help=benchmark.does, **texts))
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
