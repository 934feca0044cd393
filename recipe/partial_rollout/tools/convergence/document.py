"""``convergence.md`` and ``convergence.png``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from recipe.partial_rollout.tools.convergence.arms import bound_of
from recipe.partial_rollout.tools.convergence.curves import LAST, ArmCurve, gap
from recipe.partial_rollout.tools.report.table import Table
from recipe.partial_rollout.tools.study import BASELINE

PICTURE, TEXT = "convergence.png", "convergence.md"
_HUES = {BASELINE: "#555555", "corrected": "#0072B2", "uncorrected": "#D55E00", "clipped": "#CC79A7"}
_LABELS = {"corrected": "PR, corrected", "uncorrected": "PR, correction=none", "clipped": "PR, behaviour clipping"}


def label(name: str) -> str:
    """An arm's name in words."""
    bound = bound_of(name)
    return f"{_LABELS[name.partition('_')[0]]}, {bound.label}" if bound else name


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
                _figure(curve.final, curve.final_error),
                "" if curve is baseline else _figure(difference, error, sign=True),
                within,
            ]
        )
    header = ["arm", "seeds", "staleness of trained samples", "final reward", f"minus {BASELINE}", "within 1 s.e."]
    return Table("Final reward", header, rows)


def _figure(value: float, error: float, *, sign: bool = False) -> str:
    text = f"{value:+.3f}" if sign else f"{value:.3f}"
    return text if math.isnan(error) else f"{text} ± {error:.3f}"


def _verdict(difference: float, error: float) -> str:
    if math.isnan(error):
        return "one seed"
    return "yes" if abs(difference) <= error else "no"


def write(curves: Sequence[ArmCurve], out: Path, command: str) -> None:
    """Table and picture into folder ``out``; ``command`` reproduces them."""
    out.mkdir(parents=True, exist_ok=True)
    draw(curves, out / PICTURE)
    text = (
        f"# Convergence on the embedded task\n\n"
        f"Reward of the current weights on held-out prompts, against trained groups; every arm starts from the same "
        f"weights and trains the same prompts. Bands are one standard error over seeds. Final reward: the mean of the "
        f"last {LAST} validations of a run. Reproduce with `{command}`.\n\n"
        f"![reward against trained groups]({PICTURE})\n\n{table(curves).markdown()}\n\n"
        f"The last column compares with the standard error of the difference of two arms.\n"
    )
    (out / TEXT).write_text(text, encoding="utf-8")


def draw(curves: Sequence[ArmCurve], path: Path) -> None:
    """One panel a staleness bound, the baseline in each."""
    baseline, others = curves[0], curves[1:]
    bounds = list(dict.fromkeys(bound_of(curve.name) for curve in others)) or [None]
    figure = Figure(figsize=(4.2 * len(bounds), 4.2), layout="constrained")
    panels = figure.subplots(1, len(bounds), sharex=True, sharey=True, squeeze=False)[0]
    for axes, bound in zip(panels, bounds, strict=True):
        shown = [baseline, *(curve for curve in others if bound_of(curve.name) == bound)]
        for curve in shown:
            kind = curve.name.partition("_")[0]
            mean, error = curve.band()
            axes.plot(curve.groups, mean, "o-", markersize=3, color=_HUES[kind], label=_LABELS.get(kind, kind))
            axes.fill_between(curve.groups, mean - error, mean + error, color=_HUES[kind], alpha=0.2, linewidth=0)
        axes.set_title(bound.label if bound else "", fontsize=11, loc="left")
        axes.set_xlabel("trained groups")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E6E6E6")
        axes.legend(frameon=False, fontsize=9)
    panels[0].set_ylabel("mean reward on held-out prompts")
    figure.savefig(path, dpi=110)
