"""``python -m recipe.partial_rollout.tools convergence [--seeds 1 2 3] [--staleness 1 4 8] [--steps N] [overrides]``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from recipe.partial_rollout.records.fields import RunRecordError
from recipe.partial_rollout.records.run_record import load_run
from recipe.partial_rollout.tools.convergence.arms import Bound, arms
from recipe.partial_rollout.tools.convergence.curves import ArmCurve, curve_of
from recipe.partial_rollout.tools.convergence.document import table, write
from recipe.partial_rollout.tools.study import Study, StudyError

BAD_INPUT = 2
_OUT = Path("outputs/convergence")
COMMAND = ("bash", "run_scripts/convergence_cpu.sh")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and write the document; exit code 1 where a run failed, 2 where nothing can be read."""
    options = _parser().parse_args(arguments)
    study = Study(
        out=options.out,
        arms=tuple(arms(options.staleness, behaviour_clipping=options.behaviour_clipping)),
        seeds=tuple(options.seeds),
        steps=options.steps,
        config_name=options.config_name,
        overrides=tuple(options.overrides),
    )
    try:
        if not options.report_only:
            print(f"{study.run_missing()} runs were missing")
        curves = read_curves(study)
    except StudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (RunRecordError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    write(curves, options.docs, _command(sys.argv[1:] if arguments is None else arguments, options.out))
    print(table(curves).console())
    print(f"\nsaved in {options.docs}")
    return 0


def read_curves(study: Study) -> list[ArmCurve]:
    """A curve for every arm with a complete run, the baseline first.

    Raises:
        ValueError: the baseline has none.
    """
    curves = []
    for arm in study.arms:
        runs = [load_run(study.directory(arm, seed)) for seed in study.seeds if study.is_complete(arm, seed)]
        if runs or arm is study.arms[0]:
            curves.append(curve_of(arm.name, runs))
    return curves


def _command(arguments: Sequence[str], out: Path) -> str:
    """The script's command line that ends here with ``arguments``; it takes the directory as ``OUT``."""
    kept = list(arguments)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    where = [] if out == _OUT else [f"OUT={out}"]
    return shlex.join([*where, *COMMAND, *kept])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipe.partial_rollout.tools convergence", description=__doc__)
    parser.add_argument("--out", type=Path, default=_OUT, help="where the runs are")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the table and the picture go")
    parser.add_argument("--steps", type=int, default=24, help="of every run, a multiple of trainer.test_freq")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--staleness",
        type=Bound.parse,
        nargs="+",
        default=[Bound(1, 1), Bound(4, 4), Bound(8, 8)],
        metavar="K[:OVERLAP]",
        help="max_staleness, and the overlap with it (default: as much as it allows)",
    )
    parser.add_argument("--behaviour-clipping", action="store_true", help="also PPO clipped to the behaviour policy")
    parser.add_argument("--config-name", default="convergence_cpu")
    parser.add_argument("--report-only", action="store_true", help="run nothing, read what is complete")
    parser.add_argument("overrides", nargs="*", help="hydra overrides for every arm")
    return parser
