"""``staleness.md`` and ``staleness.png``: AReaL's table of staleness with and without the decoupled loss, and its figure;
estimators, PR against noPR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from recipe.partial_rollout.tools.table import Table
from tests.studies.arm import BASELINE
from tests.studies.learning.arms import ESTIMATORS, ETAS, UPDATED
from tests.studies.learning.figures import ArmFigures, compare
from tests.studies.learning.run import FALL, LAST, LearningRun
from tests.studies.picture import BASELINE_HUE, DPI, plain
from tests.studies.spread import with_error

TEXT, PICTURE = "staleness.md", "staleness.png"
RATE = 3e-4
"""of the table"""
LOSSES = {"": "decoupled", "_uncorrected": "not corrected", "_mask": "decoupled, with the mask"}
"""end of the arm's name -> column"""
WAITS = "PR_eta_4_wait"
"""engines that end their requests before they load; the option is deleted"""
SEEDS, STEPS = 2, 36
"""of a cell, at least"""
RESPONSES = 512
"""of a validation"""
NOT_RUN = "not run"


def write_published(runs: Sequence[LearningRun], docs: Path, command: str) -> None:
    """Save both tables and the picture in ``docs``; ``command`` makes them again."""
    script = "bash tests/scripts/learning_study.sh --ledger tests/studies/results/runs.jsonl --starts 0"
    found = _by_arm(runs)
    etas = [f"PR_eta_{eta}{ending}" for eta in ETAS for ending in LOSSES]
    etas = [arm for arm in etas if arm not in found or len(found[arm].every) < SEEDS]
    pairs = [f"{side}_{name}" for name in ESTIMATORS for side in (BASELINE.name, "PR")]
    parts = [
        "# Staleness and the decoupled loss; estimators",
        "Embedded task. Differences of the final held-out reward (mean of three validations) from noPR's are within "
        "pairs of one warm start and seed, mean and standard error over pairs. Fell: runs whose mean of three validations "
        f"fell by {FALL:g}. Step: seconds per trained token over noPR's, median. Eta is AReaL's one knob: `overlap` and "
        "`max_staleness` alike, with separate placement; unbounded: in flight as at 16. Rows are of different commits: "
        "[every run](runs.jsonl). Runs have 36 or 48 steps: a fall that begins late is less deep in 36. "
        "Second seeds of 36 steps ran beside other work, noPR's too, so their seconds are rough. "
        f"Written by `{command}`.",
        staleness_table(runs).markdown(),
        f"![held-out reward against steps]({PICTURE})",
        "The lines are means over different warm starts, some of which end lower: the table compares within pairs.",
        f"**Cells with fewer than {SEEDS} runs.** What trains them:",
        f"```bash\n{script} --seeds 1 2 --arms noPR {' '.join(etas)}\n```",
        estimators_table(runs).markdown(),
        f"Noise: two standard errors of the difference of two finals, of {RESPONSES} responses a validation. Seconds are "
        "not told: other work ran beside. One pair each of 24 steps:",
        f"```bash\n{script} --seeds 1 --steps 24 --arms {' '.join(pairs)}\n```",
    ]
    (docs / TEXT).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    draw_staleness(runs, docs / PICTURE)


def staleness_table(runs: Sequence[LearningRun]) -> Table:
    """As AReaL's table 2 (arXiv 2505.24298): a row an eta, three columns a loss; what has not run says so."""
    found = _by_arm(runs)
    header = ["eta", *(f"{loss}: {what}" for loss in LOSSES.values() for what in ("final minus noPR", "fell", "step"))]
    rows = [["0 (noPR)", *(_cells(found.get(BASELINE.name)) * len(LOSSES))]]
    rows += [[f"{eta}", *_row(found, f"PR_eta_{eta}", tuple(LOSSES))] for eta in ETAS]
    rows.append(["4, without interruption", *_cells(found.get(WAITS)), *_cells(None), *_cells(None)])
    return Table(f"AReaL's staleness and loss, learning rate {RATE:g}", header, rows)


def _row(found: dict[str, ArmFigures], arm: str, endings: Sequence[str]) -> list[str]:
    return [cell for ending in endings for cell in _cells(found.get(f"{arm}{ending}"))]


def _cells(arm: ArmFigures | None) -> list[str]:
    if arm is None:
        return [NOT_RUN, "", ""]
    gap = arm.gap(lambda run: run.final)
    fell = sum(run.fell for run in arm.every)
    step = arm.ratio(lambda run: run.step_per_token)
    return [with_error(gap.mean, gap.error, sign=True), f"{fell} of {len(arm.every)}", f"{step:.2f}"]


def _by_arm(runs: Sequence[LearningRun]) -> dict[str, ArmFigures]:
    """Each arm's pairs of all lengths, under one name whether or not verl's pass ran."""
    long = [run for run in runs if run.rate == RATE and run.steps >= STEPS]
    named = [replace(run, arm=run.arm.removesuffix(UPDATED)) for run in long]
    found: dict[str, ArmFigures] = {}
    for more in compare(named):
        have = found.get(more.arm, ArmFigures(more.arm, more.rate, (), ()))
        parts = {name: (*getattr(have, name), *getattr(more, name)) for name in ("runs", "bases", "alone")}
        found[more.arm] = replace(have, **parts)
    return found


def draw_staleness(runs: Sequence[LearningRun], path: Path) -> None:
    """As AReaL's figure 5: held-out reward against steps, a panel a loss, a line an eta; noPR in grey."""
    found = _by_arm(runs)
    figure = Figure(figsize=(4.2 * len(LOSSES), 3.6), layout="constrained")
    panels = figure.subplots(1, len(LOSSES), sharex=True, sharey=True)
    hues = dict(zip(ETAS, colormaps["viridis_r"](np.linspace(0.1, 1, len(ETAS))), strict=True))
    for axes, (ending, loss) in zip(panels, LOSSES.items(), strict=True):
        lines = [(BASELINE.caption, found.get(BASELINE.name), BASELINE_HUE)]
        lines += [(f"eta {eta}", found.get(f"PR_eta_{eta}{ending}"), hues[eta]) for eta in ETAS]
        for label, arm, colour in lines:
            if arm is not None:
                shortest = min(arm.runs, key=lambda run: run.steps)
                mean = np.mean([run.held_out[: len(shortest.held_out)] for run in arm.runs], axis=0)
                axes.plot(shortest.validated_at, mean, color=colour, linewidth=2, label=f"{label} ({len(arm.runs)})")
        axes.set_title(loss, fontsize=10, loc="left")
        axes.set_xlabel("step")
        axes.legend(frameon=False, fontsize=8)
        plain(axes)
    panels[0].set_ylabel("held-out reward, mean over runs")
    figure.savefig(path, dpi=DPI)


def estimators_table(runs: Sequence[LearningRun]) -> Table:
    """A row an estimator: PR at the recipe's default minus noPR, of the same estimator."""
    rows = []
    for name, caption in ESTIMATORS.items():
        own = {f"{BASELINE.name}_{name}": BASELINE.name, f"PR_{name}": "PR"}
        arms = compare([replace(run, arm=own[run.arm]) for run in runs if run.arm in own])
        pair = next((arm for arm in arms if arm.arm == "PR"), None)
        if pair is None:
            rows.append([caption, NOT_RUN, "", "", "", ""])
            continue
        finals = [float(np.mean([run.final for run in side])) for side in (pair.bases, pair.runs)]
        share, gap = np.mean(finals), finals[1] - finals[0]
        noise = 2 * np.sqrt(2 * share * (1 - share) / (RESPONSES * LAST))
        verdict = "within noise" if abs(gap) <= noise else "above" if gap > 0 else "below"
        rows.append([caption, *(f"{final:.3f}" for final in finals), f"{gap:+.3f}", verdict, _cells(pair)[1]])
    return Table("Estimators", ["", BASELINE.name, "PR", "final minus noPR", "", "PR fell"], rows)
