"""``python -m recipe.partial_rollout.tools chaos --out DIR --kills 5 -- CONFIG_NAME [hydra overrides]``."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path

from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints
from recipe.partial_rollout.checkpoint.snapshot import TornCheckpointError
from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.tools.chaos.survival import survival
from recipe.partial_rollout.tools.chaos.victim import Victim
from recipe.partial_rollout.tools.command_line import described

_STARTED = "Training Progress"


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 when nothing was lost, 1 otherwise."""
    args = _arguments(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    run_dir = args.out / "run"
    log = args.out / "terminal.log"
    overrides = [
        f"--config-name={args.config}",
        f"trainer.default_local_dir={run_dir}",
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
        *args.overrides,
    ]
    dice = random.Random(args.seed)
    kills = [kill for life in range(args.kills) if (kill := _kill_once(overrides, log, dice, args, life)) is not None]
    print(f"last life: to the end of the training (terminal: {log})", flush=True)
    last = Victim(overrides, log)
    code = last.wait(args.deadline_s)
    if code != 0:
        last.kill()
        print(f"the last life ended with exit code {code}; see {log}", file=sys.stderr)
        return 1
    return _judge(run_dir, args.out, kills)


def _kill_once(
    overrides: list[str], log: Path, dice: random.Random, args: argparse.Namespace, life: int
) -> float | None:
    victim = Victim(overrides, log)
    run_dir = Path(overrides[1].split("=", 1)[1])
    try:
        victim.wait_for(_STARTED, args.deadline_s)
        delay_s = dice.uniform(*args.between_s)
        if victim.wait(delay_s) is not None:
            print(f"life {life + 1} ended by itself (exit code {victim.exit_code}) before its kill", flush=True)
            return None
        steps = len(list(run_dir.glob("global_step_*")))
        print(f"life {life + 1}: kill -9 {delay_s:.1f} s into training; {steps} checkpoints", flush=True)
    finally:
        moment = victim.kill()
    _forget_unfinished(run_dir)
    return moment


def _forget_unfinished(run_dir: Path) -> None:
    """A kill in the first save leaves nothing to resume from, and a training does not start over by itself."""
    try:
        RunCheckpoints(run_dir, checksum_all=False).to_resume("auto", None)
    except TornCheckpointError as error:
        print(f"starting over: {error}", flush=True)
        for step_dir in run_dir.glob("global_step_*"):
            shutil.rmtree(step_dir)


def _judge(run_dir: Path, out: Path, kills: list[float]) -> int:
    audited, _ = audit(run_dir)
    print(audited.table())
    survived = survival(run_dir, kills)
    report = {
        "kills": len(kills),
        "lost": audited.lost,
        "repeated": audited.repeated,
        "violations": audited.violations,
        "max_staleness": max((s for row in audited.trained for s in row.group.staleness), default=0),
        "max_staleness_allowed": audited.sizes.max_staleness if audited.sizes else None,
        "trained_groups": len(audited.trained),
        "undone_groups": audited.undone,
        "decoded_tokens": round(survived.decoded),
        "decoded_tokens_estimated": round(survived.estimated),
        "trained_tokens": survived.trained,
        "survived_share": survived.share,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    (out / "chaos.json").write_text(json.dumps(report, indent=2) + "\n")
    for key, value in report.items():
        print(f"{key:26} {value:.3f}" if isinstance(value, float) else f"{key:26} {value}")
    return 1 if audited.violations else 0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        **described(
            "chaos",
            "Kill a training again and again, resume it each time, and audit it at the end.",
            "--out outputs/chaos quickstart_cpu trainer.total_training_steps=8",
            "--out outputs/chaos --kills 2 --seed 7 --between-s 5 60 quickstart_cpu",
            more="Each kill is a kill -9 at a random moment. Exit code: 0 if nothing was lost, else 1.",
        )
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the run, its terminal and chaos.json go"
    )
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument(
        "--between-s",
        type=float,
        nargs=2,
        default=(1.0, 25.0),
        metavar=("MIN", "MAX"),
        help="seconds from the start of training to the kill, drawn from this range",
    )
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds allowed for each start, and for the training after the last kill",
    )
    parser.add_argument("config", metavar="CONFIG", help="hydra config name")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="hydra overrides")
    return parser.parse_args(arguments)
