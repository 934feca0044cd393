"""``python -m tests.studies NAME [--arms ...] [--seeds 1 2 3] [--steps N] [overrides]``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from recipe.partial_rollout.tools.command_line import Parser
from recipe.partial_rollout.tools.reading.run_log import RunRecordError
from tests.studies.named import STUDIES, NamedStudy
from tests.studies.runner import Study, StudyError

HERE = "tests.studies"
BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and report; exit code 1 where a run failed, 2 where nothing can be read."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    named = STUDIES[options.study]
    options.command = _script_command(named, words[1:], options.out)
    study = Study(
        out=options.out,
        arms=named.arms(options),
        seeds=tuple(options.seeds),
        steps=options.steps,
        config_name=options.config_name,
        overrides=(*named.overrides, *options.overrides),
    )
    docs = options.docs or options.out
    try:
        if not (options.report_only or options.figures):
            print(f"{named.train(study, options)} runs were missing")
        docs.mkdir(parents=True, exist_ok=True)
        table = named.report(study, options, docs)
    except StudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (RunRecordError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(table.console())
    print(f"\nsaved in {docs}")
    return 0


def _script_command(named: NamedStudy, words: Sequence[str], out: Path) -> str:
    """The script's command line that ends here with ``words``; it takes the directory as ``OUT``."""
    kept = list(words)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    where = [] if out == named.out else [f"OUT={out}"]
    return shlex.join([*where, "bash", named.script, *kept])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        f"python -m {HERE}",
        "Train named arms over seeds and compare them.",
        ["peers --arms noPR v1_colocate_async PR_bounded --repeats 1", "learning --report-only"],
        "A study that was stopped trains only the runs that are missing. Runs of learning that fit the same engines share "
        "a process. Exit code: 1 if a run failed, 2 if nothing can be read. The scripts in tests/scripts/ prepare the task "
        "first.",
    )
    commands = parser.add_subparsers(dest="study", required=True, metavar="NAME", title="studies")
    for name, named in STUDIES.items():
        texts = {"does": named.does, "examples": named.examples, "more": f"Prepared and run by {named.script}."}
        _add_options(commands.add_parser(name, help=named.does, **texts), named)
    return parser


def _add_options(parser: argparse.ArgumentParser, named: NamedStudy) -> None:
    """Options that all studies have, then its own."""
    usual = "all" if named.usual == named.choices else " ".join(named.usual)
    parser.set_defaults(figures=None)
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=named.choices,
        default=list(named.usual),
        metavar="ARM",
        help=f"arms to compare with the baseline: {', '.join(named.choices)} (default: {usual})",
    )
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="S", help="seeds of every arm")
    seeds.add_argument(
        "--repeats",
        dest="seeds",
        type=_up_to,
        metavar="N",
        default=argparse.SUPPRESS,
        help="short for --seeds 1 2 ... N",
    )
    parser.add_argument("--steps", type=int, default=named.steps, metavar="N", help="training steps of every run")
    parser.add_argument("--out", type=Path, default=named.out, metavar="DIR", help="where the runs go")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="where the report goes (default: that of --out)")
    parser.add_argument("--config-name", default=named.config_name, metavar="NAME", help="hydra config of every run")
    parser.add_argument("--report-only", action="store_true", help="train nothing, report the runs that are complete")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="hydra overrides for every arm")
    named.add_arguments(parser)


def _up_to(text: str) -> list[int]:
    return list(range(1, int(text) + 1))


if __name__ == "__main__":
    sys.exit(main())
