"""Pictures of a run that holds and of one that falls, for docs/working.md: ``python -m tests.studies.good_and_bad``.

Both are of the learning study's ledger, from the same warm start with the same seed; grey is the synchronous run of both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipe.partial_rollout.tools.reading.run_log import iter_lines
from tests.studies.arm import BASELINE
from tests.studies.learning.run import LearningRun
from tests.studies.picture import BASELINE_HUE, DPI, OTHERS_HUE, OURS_HUE, plain

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ROOT / "tests" / "studies" / "results" / "runs.jsonl"
START, SEED, RATE, STEPS = 0, 2, 3e-4, 48
GOOD, BAD = "PR_bounded_1.5_mask_update_decay", "PR_bounded_1.5"
FLOOR = 0.002
"""k3_kl in nats a token below which the terminal does not warn (training/step_log.py)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw ``good.png`` and ``bad.png``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "working", metavar="DIR")
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    runs = chosen()
    for name, arm, hue in (("good", GOOD, OURS_HUE), ("bad", BAD, OTHERS_HUE)):
        draw(runs[arm], runs[BASELINE.name], hue, out / f"{name}.png")
    return 0


def chosen() -> dict[str, LearningRun]:
    """The three runs by arm; one of each."""
    every = [LearningRun.from_json(*line) for line in iter_lines(LEDGER, dict, [])]
    alike = [run for run in every if (run.start, run.seed, run.rate, run.steps) == (START, SEED, RATE, STEPS)]
    return {arm: next(run for run in alike if run.arm == arm) for arm in (BASELINE.name, GOOD, BAD)}


def draw(run: LearningRun, base: LearningRun, hue: str, path: Path) -> None:
    """Three figures over the steps: held-out reward, k3_kl, staleness. No times: these runs shared the machine."""
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    reward, kl, staleness = figure.subplots(1, 3)
    for each, colour in ((base, BASELINE_HUE), (run, hue)):
        reward.plot(each.validated_at, each.held_out, color=colour, linewidth=1.8)
    steps = range(1, run.steps + 1)
    kl.plot(steps, run.series["k3_kl"], color=hue, linewidth=1.2)
    kl.axhline(FLOOR, color="black", linewidth=0.8, linestyle=":")
    kl.set_yscale("log")
    kl.set_ylim(1e-6, 1)
    staleness.plot(steps, run.series["staleness"], color=hue, linewidth=1.8)
    staleness.plot(steps, run.series["staleness_max"], color=hue, linewidth=0.8)
    if run.warned_at:
        for axes in (reward, kl):
            axes.axvline(run.warned_at, color="black", linewidth=0.8)
        kl.annotate("the terminal warns", (run.warned_at, 0.3), ha="right", va="bottom", fontsize=7)
    reward.set_ylim(0, 1)
    _named(reward, "held_out_reward")
    _named(kl, "rollout_corr/k3_kl, nats a token")
    _named(staleness, "staleness: mean, max")
    figure.savefig(path, dpi=DPI)


def _named(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=7)
    plain(axes)


if __name__ == "__main__":
    raise SystemExit(main())
