"""``convergence.md`` and ``convergence.png``."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from recipe.partial_rollout.records.run_record import RunRecord, load_run
from recipe.partial_rollout.tools.study.arm import BASELINE
from recipe.partial_rollout.tools.study.convergence.arms import KINDS, Kind, bound_of
from recipe.partial_rollout.tools.study.convergence.curves import LAST, ArmCurve, curve_of, gap
from recipe.partial_rollout.tools.study.picture import BASELINE_HUE, DPI, plain
from recipe.partial_rollout.tools.study.runner import Study
from recipe.partial_rollout.tools.study.spread import with_error
from recipe.partial_rollout.tools.table import Table

PICTURE, TEXT = "convergence.png", "convergence.md"
_BASELINE = Kind(BASELINE.caption, BASELINE_HUE, BASELINE.overrides)


def label(name: str) -> str:
    """An arm's name in words."""
    bound = bound_of(name)
    return f"{KINDS[name.partition('_')[0]].caption}, {bound.label}" if bound else name


def table(curves: Sequence[ArmCurve]) -> Table:
    """A row an arm; the first is the baseline."""
    baseline = curves[0]
    rows = []
    for curve in curves:
        difference, error = gap(curve, baseline)
        within = "" if curve is baseline else _verdict(difference, error)
        rows.append(
            [
                label(curve.name),
                str(curve.seeds),
                f"{curve.staleness_mean:.2f} (max {curve.staleness_max})",
                with_error(curve.final, curve.final_error),
                "" if curve is baseline else with_error(difference, error, sign=True),
                within,
            ]
        )
    header = ["arm", "seeds", "staleness of trained samples", "final reward", f"minus {BASELINE.name}", "within 1 s.e."]
    return Table("Final reward", header, rows)


def _verdict(difference: float, error: float) -> str:
    if math.isnan(error):
        return "one seed"
    return "yes" if abs(difference) <= error else "no"


def report(study: Study, options: Namespace, docs: Path) -> Table:
    """The table, saved in ``docs`` with the picture.

    Raises:
        RunRecordError: a run cannot be read.
        ValueError: there is no complete run of the baseline, or one without a validation.
    """
    curves = read_curves(study)
    draw(curves, docs / PICTURE)
    (docs / TEXT).write_text(_text(curves, options.command), encoding="utf-8")
    return table(curves)


def read_curves(study: Study) -> list[ArmCurve]:
    """A curve for every arm with a complete run, the baseline first."""
    runs: dict[str, list[RunRecord]] = {arm.name: [] for arm in study.arms}
    for arm, seed in study.finished():
        runs[arm.name].append(load_run(study.directory(arm, seed)))
    return [curve_of(name, found) for name, found in runs.items() if found]


def _text(curves: Sequence[ArmCurve], command: str) -> str:
    """The document; ``command`` reproduces it."""
    return (
        f"# Convergence on the embedded task\n\n"
        f"Reward of the current weights on held-out prompts, against trained groups; every arm starts from the same "
        f"weights and trains the same prompts. Bands are one standard error over seeds. Final reward: the mean of the "
        f"last {LAST} validations of a run. Reproduce with `{command}`.\n\n"
        f"![reward against trained groups]({PICTURE})\n\n{table(curves).markdown()}\n\n"
        f"The last column compares with the standard error of the difference of two arms.\n"
    )


def draw(curves: Sequence[ArmCurve], path: Path) -> None:
    """One panel a staleness bound, the baseline in each."""
    baseline, others = curves[0], curves[1:]
    bounds = list(dict.fromkeys(bound_of(curve.name) for curve in others)) or [None]
    figure = Figure(figsize=(4.2 * len(bounds), 4.2), layout="constrained")
    panels = figure.subplots(1, len(bounds), sharex=True, sharey=True, squeeze=False)[0]
    for axes, bound in zip(panels, bounds, strict=True):
        shown = [baseline, *(curve for curve in others if bound_of(curve.name) == bound)]
        for curve in shown:
            kind = KINDS.get(curve.name.partition("_")[0], _BASELINE)
            mean, error = curve.band()
            axes.plot(curve.groups, mean, "o-", markersize=3, color=kind.hue, label=kind.caption)
            axes.fill_between(curve.groups, mean - error, mean + error, color=kind.hue, alpha=0.2, linewidth=0)
        axes.set_title(bound.label if bound else "", fontsize=11, loc="left")
        axes.set_xlabel("trained groups")
        plain(axes)
        axes.legend(frameon=False, fontsize=9)
    panels[0].set_ylabel("mean reward on held-out prompts")
    figure.savefig(path, dpi=DPI)
