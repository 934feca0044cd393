"""Tells early that training is about to fall apart: the policy runs away from the one that made its samples.

python -m recipe.partial_rollout.policy_drift RUN...    # which steps of finished runs it warns of
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from recipe.partial_rollout.report.fields import RunRecordError, read_lines
from recipe.partial_rollout.report.table import Table
from recipe.partial_rollout.study import held_out_rewards

KL = "rollout_corr/kl"
"""verl's metric: mean log-ratio of the behaviour policy to the one before the update (nats a token)"""
_FACTOR, _FLOOR, _FIRST = 10.0, 0.005, 5
"""an alarm is this many times the median so far, at least this many nats, and not within the first steps"""


class PolicyDrift:
    """Compares each step's ``rollout_corr/kl`` with those before it.

    The limits were set on 54 runs of the embedded task (docs/scheduling.md): they tell all 15 whose reward fell apart, and
    one of the other 39.
    """

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._alarmed = False

    def observe(self, data: Mapping[str, Any], step: int) -> str | None:
        """A warning when the drift of ``step`` sets in; None while all is well, or since it set in."""
        if KL not in data:
            return None
        kl, usual = float(data[KL]), median(self._seen) if len(self._seen) >= _FIRST else None
        self._seen.append(abs(kl))
        before, self._alarmed = self._alarmed, usual is not None and kl > max(_FLOOR, _FACTOR * usual)
        if not self._alarmed or before:
            return None
        return (
            f"warning: at step {step} the policy has run away from the one that made its samples ({KL} {kl:.4f}, "
            f"{usual:.5f} by the median so far): its reward is likely to fall. Lower actor_rollout_ref.actor.optim.lr "
            f"or partial_rollout.overlap, and go on from an earlier checkpoint"
        )


def row_of(run: Path) -> list[str]:
    """Of a finished run: its directory, steps, the steps of its warnings, and its reward at the end.

    The reward is that of the last validation, or where there is none the mean of the last three batches.

    Raises:
        RunRecordError: ``metrics.jsonl`` cannot be read, or no step of it has ``KL``.
    """
    lines, _ = read_lines(run / "metrics.jsonl")
    data = [line.values["data"] for line in lines if "training/global_step" in line.values["data"]]
    if not any(KL in step for step in data):
        raise RunRecordError(f"{run}: no step has {KL}, which algorithm.rollout_correction makes verl log")
    drift = PolicyDrift()
    warned = [str(i) for i, step in enumerate(data, 1) if drift.observe(step, i)]
    validated = held_out_rewards(data)
    reward = validated[-1] if validated else mean(step["critic/score/mean"] for step in data[-3:])
    return [str(run), str(len(data)), " ".join(warned) or "-", f"{reward:.3f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 for a directory that holds no such run."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.partial_rollout.policy_drift",
        description="The steps of finished runs at which the drift warning sets in.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run directory: metrics.jsonl")
    try:
        rows = [row_of(run) for run in parser.parse_args(arguments).runs]
    except RunRecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(Table("Policy drift", ["run", "steps", "warned at", "reward at the end"], rows).console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
