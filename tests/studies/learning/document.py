"""``runs.md`` and ``runs.png``: the arms of a study, and every run; ``published`` writes beside them."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from recipe.partial_rollout.tools.table import Table
from tests.studies.arm import BASELINE
from tests.studies.held_out import QUALITY, WARM_UP
from tests.studies.learning.arms import caption_of
from tests.studies.learning.figures import NEAR, ArmFigures, Gap, compare
from tests.studies.learning.published import write_published
from tests.studies.learning.run import FALL, LAST, LearningRun
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
    (docs / TEXT).write_text(_text((falls_table(runs), table, runs_table(runs)), command), encoding="utf-8")
    draw(arms, docs / PICTURE)
    write_published(runs, docs, command)
    return table


def falls_table(runs: Sequence[LearningRun]) -> Table:
    """A row a learning rate, trust region and schedule of the recipe's runs, of all arms and lengths."""
    groups = defaultdict[tuple[float, str, str], list[LearningRun]](list)
    for run in runs:
        if run.arm.startswith("PR"):
            given = dict(override.lstrip("+").split("=", 1) for override in run.overrides)
            groups[run.rate, given[_REGION], given.get(_SCHEDULE, "constant")].append(run)
    rows = []
    for (rate, region, schedule), group in sorted(groups.items()):
        fallen = [run for run in group if run.fell]
        before = sum((run.warned_at or np.inf) < (run.falls_at or 0) for run in fallen)
        warned = f"{_warned(group, True)}; {_warned(group, False)}"
        rows.append([f"{rate:g}", region, schedule, f"{len(fallen)} of {len(group)}", warned, f"{before}"])
    header = "learning rate", "trust region", "schedule", "fell", "warned: fell; held", "warned before its fall"
    return Table("Falls", [*header], rows)


_REGION, _SCHEDULE = "partial_rollout.trust_region", "actor_rollout_ref.actor.optim.lr_scheduler_type"


def arms_table(arms: Sequence[ArmFigures]) -> Table:
    """A row an arm and rate."""
    return Table.of("Arms", arms, _ARM_COLUMNS)


def _unless_base(cell: Callable[[ArmFigures], str], base: str = "") -> Callable[[ArmFigures], str]:
    """``cell`` of an arm; ``base`` of the baseline."""
    return lambda arm: base if arm.arm == BASELINE.name else cell(arm)


_ARM_COLUMNS: tuple[tuple[str, Callable[[ArmFigures], str]], ...] = (
    ("arm", lambda arm: caption_of(arm.arm)),
    ("learning rate", lambda arm: f"{arm.rate:g}"),
    ("pairs", lambda arm: f"{len(arm.runs)}"),
    (
        "final reward",
        lambda arm: with_error(float(arm.finals.mean()), float(standard_errors(arm.finals[:, None])[0])),
    ),
    (f"final minus {BASELINE.name}", _unless_base(lambda arm: _gap(arm.gap(lambda run: run.final)))),
    ("held", lambda arm: arm.held),
    ("fell at step (start, seed)", lambda arm: _places(arm.every)),
    (
        f"rollout / {BASELINE.name}",
        _unless_base(lambda arm: f"{arm.ratio(lambda run: run.rollout_per_token):.2f}", "1"),
    ),
    (f"step / {BASELINE.name}", _unless_base(lambda arm: f"{arm.ratio(lambda run: run.step_per_token):.2f}", "1")),
    (f"seconds to {QUALITY:g}", lambda arm: _or(arm.seconds_to_quality, ".0f", "never")),
    (f"the same / {BASELINE.name}", _unless_base(lambda arm: _median(arm.time_ratios(lambda base: QUALITY)))),
    (
        f"time to {BASELINE.name}'s final / {BASELINE.name}",
        _unless_base(lambda arm: _median(arm.time_ratios(lambda base: base.final - NEAR))),
    ),
    (
        "staleness mean / max",
        lambda arm: (
            f"{np.mean([run.staleness_mean for run in arm.runs]):.2f} / {max(run.staleness_max for run in arm.runs):.0f}"
        ),
    ),
    ("largest k3", lambda arm: f"{np.median([run.largest_k3 for run in arm.runs]):.4f}"),
    ("variation of batch length", lambda arm: f"{np.mean([run.length_variation for run in arm.runs]):.2f}"),
)


def _places(runs: Sequence[LearningRun]) -> str:
    return ", ".join(f"{run.falls_at} ({run.start}, {run.seed})" for run in runs if run.fell)


def _warned(runs: Sequence[LearningRun], fell: bool) -> str:
    """In how many of the runs that fell, or held, the recipe warned of drift."""
    runs = [run for run in runs if run.fell is fell]
    return f"{sum(run.warned_at is not None for run in runs)} of {len(runs)}"


def _masked(shares: Sequence[float]) -> str:
    return f"{np.mean(shares):.3%} / {max(shares):.2%}" if shares else ""


def _median(ratios: Sequence[float]) -> str:
    """With the range; empty without ratios."""
    return f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def _or(figure: float | None, form: str, none: str) -> str:
    return none if figure is None else format(figure, form)


def _gap(gap: Gap) -> str:
    return with_error(gap.mean, gap.error, sign=True) + ("" if gap.within is not False else " (below)")


def runs_table(runs: Sequence[LearningRun]) -> Table:
    """A row a run."""
    return Table.of("Runs", runs, _RUN_COLUMNS)


_RUN_COLUMNS: tuple[tuple[str, Callable[[LearningRun], str]], ...] = (
    ("arm", lambda run: caption_of(run.arm)),
    ("learning rate", lambda run: f"{run.rate:g}"),
    ("steps", lambda run: f"{run.steps}"),
    ("start", lambda run: f"{run.start}"),
    ("seed", lambda run: f"{run.seed}"),
    ("held-out reward", lambda run: " ".join(f"{reward:.3f}".removeprefix("0") for reward in run.held_out)),
    ("final", lambda run: f"{run.final:.3f}"),
    ("falls / warned at step", lambda run: f"{run.falls_at or '-'} / {run.warned_at or '-'}"),
    ("effective sample then", lambda run: _or(run.ess_at_warning, ".3f", "")),
    ("tokens masked, mean / max", lambda run: _masked(run.series["masked"])),
    ("staleness mean / max", lambda run: f"{run.staleness_mean:.2f} / {run.staleness_max:.0f}"),
    ("largest k3", lambda run: f"{run.largest_k3:.4f}"),
    ("variation of batch length", lambda run: f"{run.length_variation:.2f}"),
    ("rollout s", lambda run: f"{sum(run.series['rollout_s']):.0f}"),
    ("commit", lambda run: run.commit),
)


def _text(tables: Sequence[Table], command: str) -> str:
    words = (
        "Reward of the current weights on held-out prompts. Differences are within pairs of runs from the same warm start "
        "with the same seed and learning rate, mean and standard error over pairs; *below*: by more than that error. "
        f"Final: the mean of the last {LAST} validations. "
        f"Held: the mean of {LAST} validations in a row never fell by {FALL:g} or more, of all runs. "
        "Warned: the recipe's warning of drift, in how many of the runs that fell and that held. "
        f"Falls at: the first validation {FALL:g} below the best before it, where the run has not held. "
        f"Rollout and step: seconds per trained token over the baseline's, median over pairs, from step {WARM_UP + 1} on "
        "(vLLM compiles before). "
        f"Seconds to {QUALITY:g}: training time from there until two validations in a row reach it, median over runs; "
        "over the baseline's: median and range of the pairs where both reach it. "
        f"Time to {BASELINE.name}'s final: the same for its final reward less {NEAR:g}. "
        f"Written by `{command}`."
    )
    title, picture = "# Learning on the embedded task: every run", f"![held-out reward against steps]({PICTURE})"
    return "\n\n".join((title, words, picture, *(table.markdown() for table in tables))) + "\n"


def draw(arms: Sequence[ArmFigures], path: Path) -> None:
    """A panel for every arm and rate but the baseline's, with the baseline's runs of the same rate behind it."""
    shown = [figures for figures in arms if figures.arm != BASELINE.name] or list(arms)
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, figures in zip(panels, shown, strict=False):
        hue = OURS_HUE if figures.arm.startswith("PR") else OTHERS_HUE
        for runs, colour, label in (
            (figures.bases, BASELINE_HUE, BASELINE.caption),
            (figures.every, hue, "arm"),
        ):
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
