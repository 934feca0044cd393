"""``python -m tests.chaos --out DIR --faults 8 -- CONFIG_NAME [hydra overrides]``."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

from recipe.partial_rollout.checkpoint.manifest import TornCheckpointError
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints
from recipe.partial_rollout.terminal import OUTPUT
from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.tools.command_line import Parser
from tests.chaos.effects import commands, conversations, differences
from tests.chaos.faults import ORDERS, Kind, Outcome, inflict
from tests.chaos.survival import survival
from tests.chaos.victim import Victim

_STARTED = "Training Progress"
"""verl's bar, which begins once every process of the training is up"""
_HERE = Path(__file__).parent
_INTERRUPT_S = 8.0
"""``partial_rollout.deadlines.interrupt_s`` of the training: within it a worker must answer"""


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 when nothing was lost and nothing hung, 1 otherwise."""
    args = _arguments(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    dice, outcomes = random.Random(args.seed), list[Outcome]()
    args.deck = deal(args.kinds, args.faults, dice)
    while len(outcomes) < args.faults:
        before = len(outcomes)
        if _live(args, dice, outcomes):
            print(f"the training ended before fault {len(outcomes) + 1}", flush=True)
            break
        if len(outcomes) == before:
            return 1
        _forget_unfinished(args.out / "run")
    print(f"last life: to the end of the training (terminal: {args.out / 'terminal.log'})", flush=True)
    last = _begin(args)
    code = last.wait(args.deadline_s)
    if code != 0:
        last.kill()
        print(f"the last life ended with exit code {code}; see {args.out / 'terminal.log'}", file=sys.stderr)
        return 1
    return _judge(args.out, outcomes, args.undisturbed)


def deal(kinds: list[str], count: int, dice: random.Random) -> list[Kind]:
    """``count`` faults at random, each kind as often as the others or once more."""
    dealt = list[Kind]()
    while len(dealt) < count:
        dealt += dice.sample([Kind(kind) for kind in kinds], len(kinds))
    return dealt[:count]


def _begin(args: argparse.Namespace) -> Victim:
    orders = args.out / "orders"
    orders.mkdir(exist_ok=True)
    overrides = [
        f"--config-name={args.config}",
        f"trainer.default_local_dir={args.out / 'run'}",
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
        f"partial_rollout.deadlines.interrupt_s={_INTERRUPT_S:g}",
        f"partial_rollout.failures.worker_restarts={max(args.faults, 1)}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={_HERE / 'agent_loops.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=faulty_agent",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "actor_rollout_ref.rollout.multi_turn.format=effects",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={_HERE / 'tools.yaml'}",
        # Conversations are to be the same in every run.
        "actor_rollout_ref.actor.optim.lr=0",
        *args.overrides,
    ]
    return Victim(overrides, args.out / "terminal.log", args.out / "run" / OUTPUT, {ORDERS: str(orders.resolve())})


def _live(args: argparse.Namespace, dice: random.Random, outcomes: list[Outcome]) -> bool:
    """One life of the training, until a fault ends it or there are enough; returns whether it ended by itself, done."""
    victim = _begin(args)
    try:
        victim.wait_for(_STARTED, args.deadline_s)
        while len(outcomes) < args.faults:
            kind, delay_s = args.deck[len(outcomes)], dice.uniform(*args.between_s)
            if victim.wait(delay_s) is not None:
                print(f"the training ended by itself (exit code {victim.exit_code}): {victim.last_words}", flush=True)
                return victim.exit_code == 0
            outcomes.append(inflict(kind, victim, args.out / "run", args.out / "orders", _INTERRUPT_S))
            last = outcomes[-1]
            alone = kind in (Kind.KILL, Kind.DRIVER)
            became = "killed" if alone else last.ended or f"a step ended {last.silent_s:.1f} s later"
            print(f"fault {len(outcomes)}: {kind} {delay_s:.1f} s after the last one: {became}", flush=True)
            if victim.exit_code is not None:
                return False
    finally:
        victim.kill()
    return False


def _forget_unfinished(run_dir: Path) -> None:
    """A kill in the first save leaves nothing to resume from, and a training does not start over by itself."""
    try:
        RunCheckpoints(run_dir)
    except TornCheckpointError as error:
        print(f"starting over: {error}", flush=True)
        for step_dir in run_dir.glob("global_step_*"):
            shutil.rmtree(step_dir)


def _judge(out: Path, outcomes: list[Outcome], undisturbed: Path | None) -> int:
    audited, _ = audit(out / "run")
    print(audited.table())
    fatal = [outcome.at for outcome in outcomes if outcome.kind is Kind.KILL or outcome.ended is not None]
    survived = survival(out / "run", fatal)
    held = conversations(out / "orders")
    told = [] if undisturbed is None else differences(held, conversations(undisturbed / "orders"))
    hung = [violation for outcome in outcomes if (violation := outcome.violation) is not None]
    report = {
        "faults": [{**asdict(outcome), "at": round(outcome.at, 1)} for outcome in outcomes],
        "lost": audited.lost,
        "repeated": audited.repeated,
        "violations": [*audited.violations, *audited.notes(), *hung, *told],
        "max_staleness": audited.max_staleness,
        "max_staleness_allowed": audited.sizes.max_staleness,
        "trained_groups": sum(len(entry.trained) for entry in audited.entries),
        "undone_groups": audited.undone,
        "conversations": len(held),
        "effects": sum(conversation.effects for conversation in held.values()),
        # A conversation begins anew after a crash: its commands may run again.
        "commands": commands(out / "orders"),
        "compared_with": undisturbed and str(undisturbed),
        "decoded_tokens": round(survived.decoded),
        "decoded_tokens_estimated": round(survived.estimated),
        "trained_tokens": survived.trained,
        "survived_share": survived.share,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    (out / "chaos.json").write_text(json.dumps(report, indent=2) + "\n")
    del report["faults"]  # printed as they came
    for key, value in report.items():
        print(f"{key:26} {value:.3f}" if isinstance(value, float) else f"{key:26} {value}")
    return 1 if report["violations"] else 0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        "python -m tests.chaos",
        "Inflict faults on a training at random moments, resume it where they end it, and audit it at the end.",
        [
            "--out outputs/chaos quickstart_cpu trainer.total_training_steps=8",
            "--out outputs/chaos --faults 2 --kinds kill --seed 7 --between-s 5 60 quickstart_cpu",
        ],
        "Kinds: kill -9 of everything, or of driver, worker, engine, node or trainer alone; an agent-loop worker that "
        "stops, a dropped Ray connection, a cancelled call in an agent loop. The conversations run commands in "
        "tests.chaos.workspace. Exit code: 0 if nothing was lost, no effect doubled and nothing hung, else 1.",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the run, its terminal and chaos.json go"
    )
    parser.add_argument("--faults", type=int, default=9, metavar="N", help="number of faults")
    parser.add_argument("--kinds", nargs="+", choices=list(Kind), default=list(Kind), help="dealt at random")
    parser.add_argument(
        "--undisturbed", type=Path, metavar="DIR", help="--out of such a training with --faults 0, to compare with"
    )
    parser.add_argument("--seed", type=int, default=0, help="of kinds and moments")
    parser.add_argument(
        "--between-s",
        type=float,
        nargs=2,
        default=(1.0, 25.0),
        metavar=("MIN", "MAX"),
        help="seconds from the start of training, or the last fault, to the next; drawn from this range",
    )
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds allowed for each start, and for the training after the last fault",
    )
    parser.add_argument("config", metavar="CONFIG", help="hydra config name")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="hydra overrides")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
