"""``learning.md``: the runs of a study, arm by arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipe.partial_rollout.tools.study.learning.run import LearningRun
from recipe.partial_rollout.tools.table import Table


def report(runs: Sequence[LearningRun], docs: Path) -> Table:
    """The table, saved in ``docs``."""
    table = runs_table(runs)
    (docs / "learning.md").write_text(table.markdown() + "\n")
    return table


def runs_table(runs: Sequence[LearningRun]) -> Table:
    """A row a run."""
    rows = [
        [
            run.arm,
            f"{run.rate:g}",
            f"{run.start}",
            f"{run.seed}",
            " ".join(f"{reward:.3f}" for reward in run.held_out),
            f"{run.final:.3f}",
            f"{run.area:.3f}",
            f"{run.staleness_mean:.2f} / {run.staleness_max:.0f}",
            f"{max(run.series['k3_kl'], default=0.0):.4f}",
            f"{run.length_variation:.2f}",
            f"{sum(run.series['rollout_s']):.0f}",
        ]
        for run in runs
    ]
    header = ["arm", "lr", "start", "seed", "held-out reward", "final", "area", "staleness mean / max", "largest k3"]
    return Table("Runs", [*header, "length variation", "rollout s"], rows)
