"""``runs.md`` and ``runs.png``: the arms of a study, and every run."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from recipe.partial_rollout.tools.table import Table
from tests.studies.arm import BASELINE
from tests.studies.held_out import QUALITY, WARM_UP
from tests.studies.learning.arms import caption_of
from tests.studies.learning.figures import FALL, NEAR, ArmFigures, Gap, compare
from tests.studies.learning.run import LAST, LearningRun
from tests.studies.picture import BASELINE_HUE, DPI, OTHERS_HUE, OURS_HUE, plain
from tests.studies.spread import standard_errors, with_error

TEXT, PICTURE = "runs.md", "runs.png"
_TITLE_WIDTH = 38
"""characters that fit above a panel"""


def report(runs: Sequence[LearningRun], docs: Path, command: str) -> Table:
    """The arms' table, saved in ``docs`` with that of the runs and the picture; ``command`` makes them again.

    Raises:
        ValueError: the baseline has no run.
    """
    arms = compare(runs)
    if not arms:
        raise ValueError(f"no run of {BASELINE.name} to compare with")
    table = arms_table(arms)
    (docs / TEXT).write_text(_text(table, runs_table(runs), command), encoding="utf-8")
    draw(arms, docs / PICTURE)
    return table


def arms_table(arms: Sequence[ArmFigures]) -> Table:
    """A row an arm and rate."""
    rows = []
    for figures in arms:
        ours = figures.arm != BASELINE.name
        final, area = figures.gap(lambda run: run.final), figures.gap(lambda run: run.area)
        seconds = figures.seconds_to_quality
        rows.append(
            [
                caption_of(figures.arm),
                f"{figures.rate:g}",
                f"{len(figures.runs)}",
                with_error(float(figures.finals.mean()), float(standard_errors(figures.finals[:, None])[0])),
                _gap(final) if ours else "",
                _gap(area) if ours else "",
                f"{figures.held} of {len(figures.runs)}",
                f"{figures.ratio(lambda run: run.rollout_per_token):.2f}" if ours else "1",
                f"{figures.ratio(lambda run: run.step_per_token):.2f}" if ours else "1",
                "never" if seconds is None else f"{seconds:.0f}",
                _share(figures.time_ratio(lambda base: QUALITY)) if ours else "",
                _share(figures.time_ratio(lambda base: base.final - NEAR)) if ours else "",
                f"{np.mean([run.staleness_mean for run in figures.runs]):.2f} / "
                f"{max(run.staleness_max for run in figures.runs):.0f}",
                f"{np.median([run.largest_k3 for run in figures.runs]):.4f}",
                f"{np.mean([run.length_variation for run in figures.runs]):.2f}",
            ]
        )
    header = [
        "arm",
        "learning rate",
        "runs",
        "final reward",
        f"final minus {BASELINE.name}",
        f"area minus {BASELINE.name}",
        "held",
        f"rollout / {BASELINE.name}",
        f"step / {BASELINE.name}",
        f"seconds to {QUALITY:g}",
        f"the same / {BASELINE.name}",
        f"time to {BASELINE.name}'s final / {BASELINE.name}",
        "staleness mean / max",
        "largest k3",
        "variation of batch length",
    ]
    return Table("Arms", header, rows)


def _share(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _gap(gap: Gap) -> str:
    return with_error(gap.mean, gap.error, sign=True) + ("" if gap.within is not False else " (below)")


def runs_table(runs: Sequence[LearningRun]) -> Table:
    """A row a run."""
    rows = [
        [
            caption_of(run.arm),
            f"{run.rate:g}",
            f"{run.start}",
            f"{run.seed}",
            " ".join(f"{reward:.3f}".removeprefix("0") for reward in run.held_out),
            f"{run.final:.3f}",
            f"{run.area:.3f}",
            f"{run.staleness_mean:.2f} / {run.staleness_max:.0f}",
            f"{run.largest_k3:.4f}",
            f"{run.length_variation:.2f}",
            f"{sum(run.series['rollout_s']):.0f}",
            run.commit,
        ]
        for run in runs
    ]
    header = ["arm", "learning rate", "start", "seed", "held-out reward", "final", "area", "staleness mean / max"]
    return Table("Runs", [*header, "largest k3", "variation of batch length", "rollout s", "commit"], rows)


def _text(arms: Table, runs: Table, command: str) -> str:
    words = (
        "Reward of the current weights on held-out prompts. Differences are within pairs of runs from the same warm start "
        "with the same seed and learning rate, mean and standard error over pairs; *below*: by more than that error. "
        f"Final: the mean of the last {LAST} validations. Area: the mean of all. "
        f"Held: the mean of {LAST} validations in a row never fell by {FALL:g} or more. "
        f"Rollout and step: seconds per trained token over the baseline's, median over pairs, from step {WARM_UP + 1} on "
        "(vLLM compiles before). "
        f"Seconds to {QUALITY:g}: training time from there until two validations in a row reach it, median over runs; "
        "over the baseline's: median of the pairs where both reach it. "
        f"Time to {BASELINE.name}'s final: the same for its final reward less {NEAR:g}. "
        f"Written by `{command}`."
    )
    return (
        f"# Learning on the embedded task: every run\n\n{words}\n\n![held-out reward against steps]({PICTURE})\n\n"
        f"{arms.markdown()}\n\n{runs.markdown()}\n"
    )


def draw(arms: Sequence[ArmFigures], path: Path) -> None:
    """A panel for every arm and rate but the baseline's, with the baseline's runs of the same rate behind it."""
    shown = [figures for figures in arms if figures.arm != BASELINE.name] or list(arms)
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, figures in zip(panels, shown, strict=False):
        hue = OURS_HUE if figures.arm.startswith("PR") else OTHERS_HUE
        for runs, colour, label in ((figures.bases, BASELINE_HUE, BASELINE.caption), (figures.runs, hue, "arm")):
            for run in runs:
                axes.plot(run.validated_at, run.held_out, color=colour, linewidth=0.7, alpha=0.45)
            mean = np.mean([run.held_out for run in runs], axis=0)
            axes.plot(runs[0].validated_at, mean, color=colour, linewidth=2.2, label=label)
        title = textwrap.fill(f"{caption_of(figures.arm)}, {figures.rate:g}", _TITLE_WIDTH)
        axes.set_title(title, fontsize=9, loc="left")
        plain(axes)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    panels[0].set_ylabel("held-out reward")
    panels[0].legend(frameon=False, fontsize=8)
    for axes in panels[-columns:]:
        axes.set_xlabel("step")
    figure.savefig(path, dpi=DPI)
