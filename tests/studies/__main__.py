"""``python -m tests.studies learning [--arms ...] [--rates ...] [--starts ...] [--seeds ...] [overrides]``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from recipe.partial_rollout.records.jsonl import RunRecordError
from recipe.partial_rollout.tools.command_line import described
from tests.studies import learning
from tests.studies.arm import BASELINE
from tests.studies.learning.arms import ARMS, COMMON, USUAL, at_rates
from tests.studies.learning.campaign import LEDGER, Campaign
from tests.studies.learning.document import report
from tests.studies.runner import Study, StudyError

HERE = "tests.studies"
SCRIPT = "run_scripts/learning_study.sh"
OUT = Path("outputs/learning")
BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and report; exit code 1 where a run failed, 2 where nothing can be read."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    study = Study(
        out=options.out,
        # Everything is compared with the baseline.
        arms=at_rates(dict.fromkeys((BASELINE.name, *options.arms)), options.rates),
        seeds=tuple(options.seeds),
        steps=options.steps,
        config_name=options.config_name,
        overrides=(*COMMON, *options.overrides),
    )
    campaign = Campaign(study, tuple(options.starts), options.ledger or study.out / LEDGER)
    docs = options.docs or options.out
    try:
        if not options.report_only:
            print(f"{campaign.run_missing()} runs were missing")
        docs.mkdir(parents=True, exist_ok=True)
        table = report(campaign.chosen(), docs, _script_command(words[1:], options.out))
    except StudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (RunRecordError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(table.console())
    print(f"\nsaved in {docs}")
    return 0


def _script_command(words: Sequence[str], out: Path) -> str:
    """The script's command line that ends here with ``words``; it takes the directory as ``OUT``."""
    kept = list(words)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    where = [] if out == OUT else [f"OUT={out}"]
    return shlex.join([*where, "bash", SCRIPT, *kept])


def _parser() -> argparse.ArgumentParser:
    example = "learning --arms noPR PR_in_order_2_mask_update --rates 2e-4 3e-4 --starts 0 1 --seeds 1"
    more = (
        "A study that was stopped trains only the runs that are missing. Runs that fit the same engines share a process. "
        f"Exit code: 1 if a run failed, 2 if nothing can be read. Prepared and run by {SCRIPT}."
    )
    parser = argparse.ArgumentParser(
        **described("", "Train named arms over seeds and compare them.", example, more=more, door=HERE)
    )
    commands = parser.add_subparsers(dest="study", required=True, metavar="NAME", title="studies")
    does = str(learning.__doc__)
    examples = (example.removeprefix("learning "), "--report-only")
    command = commands.add_parser("learning", help=does, **described("learning", does, *examples, more=more, door=HERE))
    add = command.add_argument
    add(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=list(USUAL),
        metavar="ARM",
        help=f"arms to compare with the baseline: {', '.join(ARMS)} (default: {' '.join(USUAL)})",
    )
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="S", help="seeds of every arm")
    add("--steps", type=int, default=48, metavar="N", help="training steps of every run")
    add("--rates", type=float, nargs="+", default=[3e-4], metavar="LR", help="learning rates of every arm")
    add("--starts", type=int, nargs="+", default=[0, 1, 2], metavar="S", help="seeds of the warm starts")
    add("--ledger", type=Path, metavar="FILE", help=f"what finished runs have learnt (default: {LEDGER} in --out)")
    add("--out", type=Path, default=OUT, metavar="DIR", help="where the runs go")
    add("--docs", type=Path, metavar="DIR", help="where the report goes (default: that of --out)")
    add("--config-name", default="quickstart_cpu", metavar="NAME", help="hydra config of every run")
    add("--report-only", action="store_true", help="train nothing, report the runs that are complete")
    add("overrides", nargs="*", metavar="OVERRIDE", help="hydra overrides for every arm")
    return parser


if __name__ == "__main__":
    sys.exit(main())
