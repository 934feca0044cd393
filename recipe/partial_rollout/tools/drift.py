"""Steps of finished runs at which the drift warning would have fired: ``tools drift RUN...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from recipe.partial_rollout.records.figures import held_out_rewards
from recipe.partial_rollout.tools.command_line import described
from recipe.partial_rollout.tools.reading.lines import RunRecordError
from recipe.partial_rollout.tools.run_record import METRICS, read_metrics
from recipe.partial_rollout.tools.table import Table
from recipe.partial_rollout.training.step_log import KL, PolicyDrift


def row_of(run: Path) -> list[str]:
    """A finished run's row: its directory, steps, the steps of its warnings, and its reward at the end.

    The reward is that of the last validation or, if there is none, the mean of the last three batches.

    Raises:
        RunRecordError: ``metrics.jsonl`` cannot be read, or no step of it has ``KL``.
    """
    lines, _ = read_metrics(run / METRICS)
    data = [line.values for line in lines if line.trained]
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
        **described(
            "drift",
            "List the steps at which the drift warning would have fired in finished runs.",
            "outputs/quickstart/PR",
            "outputs/learning/start_0/*/seed_1",
        )
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directory of a run, with metrics.jsonl")
    try:
        rows = [row_of(run) for run in parser.parse_args(arguments).runs]
    except RunRecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(Table("Policy drift", ["run", "steps", "warned at", "reward at the end"], rows).console())
    return 0
