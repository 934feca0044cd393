"""The studies that the command knows: their arms, what these are run on, and how they are reported."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipe.partial_rollout.tools.study import convergence, peers
from recipe.partial_rollout.tools.study.arm import BASELINE, Arm
from recipe.partial_rollout.tools.study.convergence.arms import KINDS, USUAL, Bound, arms
from recipe.partial_rollout.tools.study.convergence.document import report as report_convergence
from recipe.partial_rollout.tools.study.peers.arms import ARMS, TASK
from recipe.partial_rollout.tools.study.peers.document import report as report_peers
from recipe.partial_rollout.tools.study.runner import Study
from recipe.partial_rollout.tools.table import Table


@dataclass(frozen=True, slots=True)
class NamedStudy:
    """A set of arms with columns of its own."""

    does: str
    """one sentence"""
    examples: tuple[str, ...]
    """of its arguments, for ``--help``"""
    script: str
    """that prepares the embedded task and then runs the study"""
    config_name: str
    steps: int
    out: Path
    """where its runs go by default"""
    docs: Path | None
    """where its report goes by default; None: beside the runs"""
    choices: tuple[str, ...]
    """what ``--arms`` takes"""
    usual: tuple[str, ...]
    """what it is by default"""
    arms: Callable[[argparse.Namespace], tuple[Arm, ...]]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    report: Callable[[Study, argparse.Namespace, Path], Table]
    """saves the report of the finished runs in a folder, and returns its table"""
    overrides: tuple[str, ...] = ()
    """for all arms, before the user's"""


def _peer_arms(options: argparse.Namespace) -> tuple[Arm, ...]:
    # Everything is compared with the baseline.
    return tuple(arm for arm in ARMS if arm.name in (BASELINE.name, *options.arms))


def _peer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="JSON",
        help="train nothing, report the figures that an earlier report saved here",
    )


def _convergence_arms(options: argparse.Namespace) -> tuple[Arm, ...]:
    clipped = ("clipped",) if options.behaviour_clipping else ()
    return tuple(arms(options.staleness, (*options.arms, *clipped)))


def _convergence_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--staleness",
        type=Bound.parse,
        nargs="+",
        default=[Bound(1, 1), Bound(4, 4), Bound(8, 8)],
        metavar="K[:OVERLAP]",
        help="max_staleness of each arm, and its overlap (the same number unless given)",
    )
    parser.add_argument("--behaviour-clipping", action="store_true", help="add the arm clipped")


_PEERS = tuple(arm.name for arm in ARMS)
STUDIES = {
    "peers": NamedStudy(
        does=str(peers.__doc__),
        examples=("--arms noPR v1_colocate_async PR_bounded --repeats 1", "--report-only"),
        script="run_scripts/bench_peers_cpu.sh",
        config_name="quickstart_cpu",
        steps=36,
        out=Path("outputs/peers"),
        docs=None,
        choices=_PEERS,
        usual=_PEERS,
        arms=_peer_arms,
        add_arguments=_peer_arguments,
        report=report_peers,
        overrides=TASK,
    ),
    "convergence": NamedStudy(
        does=str(convergence.__doc__),
        examples=("--arms corrected --staleness 1 4:2 --seeds 1 2", "--report-only"),
        script="run_scripts/convergence_cpu.sh",
        config_name="convergence_cpu",
        steps=24,
        out=Path("outputs/convergence"),
        docs=Path("docs"),
        choices=tuple(KINDS),
        usual=USUAL,
        arms=_convergence_arms,
        add_arguments=_convergence_arguments,
        report=report_convergence,
    ),
}
