"""The studies that the command knows: their arms, what these are run on, and how they are reported."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipe.partial_rollout.tools.table import Table
from tests.studies import learning, peers
from tests.studies.arm import BASELINE, Arm
from tests.studies.learning import arms as learning_arms
from tests.studies.learning.campaign import LEDGER, Campaign
from tests.studies.learning.document import report as report_learning
from tests.studies.peers.arms import ARMS, TASK
from tests.studies.peers.document import report as report_peers
from tests.studies.runner import Study


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
    train: Callable[[Study, argparse.Namespace], int] = lambda study, options: study.run_missing()
    """trains what is missing; returns how many runs that were"""


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


def _learning_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[3e-4], metavar="LR", help="learning rates of every arm"
    )
    parser.add_argument(
        "--starts", type=int, nargs="+", default=[0, 1, 2], metavar="S", help="seeds of the warm starts"
    )
    parser.add_argument(
        "--ledger", type=Path, metavar="FILE", help=f"what finished runs have learnt (default: {LEDGER} in --out)"
    )


def _campaign(study: Study, options: argparse.Namespace) -> Campaign:
    return Campaign(study, tuple(options.starts), options.ledger or study.out / LEDGER)


_PEERS = tuple(arm.name for arm in ARMS)
STUDIES = {
    "peers": NamedStudy(
        does=str(peers.__doc__),
        examples=("--arms noPR v1_colocate_async PR_bounded --repeats 1", "--report-only"),
        script="tests/scripts/bench_peers_cpu.sh",
        config_name="quickstart_cpu",
        steps=36,
        out=Path("outputs/peers"),
        choices=_PEERS,
        usual=_PEERS,
        arms=_peer_arms,
        add_arguments=_peer_arguments,
        report=report_peers,
        overrides=TASK,
    ),
    "learning": NamedStudy(
        does=str(learning.__doc__),
        examples=("--arms noPR PR_overtake_0_2_mask --rates 2e-4 3e-4 --starts 0 1 --seeds 1", "--report-only"),
        script="tests/scripts/learning_study.sh",
        config_name="quickstart_cpu",
        steps=48,
        out=Path("outputs/learning"),
        choices=tuple(learning_arms.ARMS),
        usual=learning_arms.USUAL,
        # Everything is compared with the baseline.
        arms=lambda options: learning_arms.at_rates(dict.fromkeys((BASELINE.name, *options.arms)), options.rates),
        add_arguments=_learning_arguments,
        report=lambda study, options, docs: report_learning(_campaign(study, options).runs(), docs, options.command),
        overrides=learning_arms.COMMON,
        train=lambda study, options: _campaign(study, options).run_missing(),
    ),
}
