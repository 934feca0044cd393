"""``python -m tests.bench NAME [options]``: runs one benchmark; exit code 1 when it misses its bound."""

from __future__ import annotations

import sys

from recipe.partial_rollout.tools.command_line import Parser
from tests.bench import attention, distribution, front_end, hold, log_probs, manager, scale, snapshot

HERE = "tests.bench"
BENCHMARKS = {
    "manager": (manager, "Time every verb of the prompts manager with many samples in flight.", "--samples 20000"),
    "snapshot": (snapshot, "Time a checkpoint of the prompts manager: capture, write and load.", "--groups 128"),
    "distribution": (distribution, "Test whether a proposer changes what the engine samples.", "--method ngram"),
    "hold": (hold, "Time holds of an engine: until it stands still, and until it decodes again.", "--running 64"),
    "front-end": (front_end, "Time vLLM's front end a token, with and without pieces.", "--running 64 --repeats 1"),
    "attention": (attention, "Time an update padded and packed without flash-attn.", "--budgets 4096 --repeats 1"),
    "log-probs": (log_probs, "Measure log-probs and entropy without flash-attn beside verl's own.", "--tokens 512"),
    "scale": (scale, "Measure what scheduling costs with up to 1,024 replicas.", "--replicas 1 64 --rounds 1"),
}
"""by name: its module, with ``add_arguments`` and ``run``, what it does, and an example"""


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark."""
    examples = ["manager --samples 20000", "scale --replicas 1 64"]
    parser = Parser(f"python -m {HERE}", "Measure one part of the recipe.", examples)
    commands = parser.add_subparsers(required=True, metavar="NAME", title="benchmarks")
    for name, (module, does, example) in BENCHMARKS.items():
        command = commands.add_parser(name, help=does, does=does, examples=[example], more=module.BOUND)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
