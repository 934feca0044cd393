"""The recipe beside its peers, by real training of the embedded task: noPR, verl's v1 trainers, PR with each policy.

Every arm trains as many groups of the same data from the same weights; arms are interleaved, repeat by repeat, and what is
compared are ratios within a repeat. A run that is complete is not run again, so the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from recipe.partial_rollout.tools.bench.peer_arms import ARMS, LABELS, TASK
from recipe.partial_rollout.tools.bench.peer_runs import PeerRun, read_run
from recipe.partial_rollout.tools.convergence.curves import standard_errors
from recipe.partial_rollout.tools.report.table import Table
from recipe.partial_rollout.tools.study import BASELINE, Study, StudyError

_FIRST, _FILLING = 5, 2
"""steps: those that length bias shows in, and those in which engines compile and fill"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = __doc__
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/peers"), help="where the runs go (default: %(default)s)"
    )
    parser.add_argument("--docs", type=Path, help="where the table, the picture and the figures go (default: --out)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=36, help="of every run (default: %(default)s)")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], default=[arm.name for arm in ARMS])
    parser.add_argument("--config-name", default="quickstart_cpu")
    parser.add_argument("--report-only", action="store_true", help="run nothing, read what is complete")
    parser.add_argument("overrides", nargs="*", help="hydra overrides for every arm")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run what is missing and print the table; exit code 1 where a run failed, 2 where nothing can be read."""
    # Everything is compared with the baseline.
    chosen = tuple(arm for arm in ARMS if arm.name in (BASELINE, *options.arms))
    study = Study(
        out=options.out,
        arms=chosen,
        seeds=tuple(range(1, options.repeats + 1)),
        steps=options.steps,
        config_name=options.config_name,
        overrides=("trainer.logger=[file]", *TASK, *options.overrides),
    )
    try:
        if not options.report_only:
            study.run_missing()
        rows = compare(read_runs(study))
    except StudyError as error:
        print(f"error: {error}")
        return 1
    except ValueError as error:
        print(f"error: {error}")
        return 2
    table = table_of(rows)
    print(table.console())
    docs = options.docs or options.out
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "peers.md").write_text(table.markdown() + "\n")
    (docs / "peers.json").write_text(json.dumps([_plain(row) for row in rows], indent=2) + "\n")
    draw(rows, docs / "peers.png")
    print(f"\nsaved in {docs}")
    return 0


def read_runs(study: Study) -> list[PeerRun]:
    """Every complete run.

    Raises:
        ValueError: the baseline has none.
    """
    runs = []
    for seed in study.seeds:
        for arm in study.arms:
            if study.is_complete(arm, seed):
                runs.append(read_run(study.directory(arm, seed), arm.name, seed, _samples_per_step(study)))
    if not any(run.arm == BASELINE for run in runs):
        raise ValueError(f"no complete run of {BASELINE} in {study.out}")
    return runs


def _samples_per_step(study: Study) -> int:
    """From the first run of the recipe's own trainer: all arms have the same batches."""
    for path in sorted(study.out.glob("*/seed_*/run.json")):
        facts = json.loads(path.read_text())
        return facts["batch_groups"] * facts["samples_per_group"]
    raise ValueError(f"no run of the recipe's own trainer in {study.out}")


@dataclass(frozen=True, slots=True)
class Row:
    """One arm: figure name to its value in each repeat."""

    arm: str
    figures: dict[str, list[float]]

    def median(self, name: str) -> float:
        return float(np.median(self.figures[name]))

    def spread(self, name: str) -> tuple[float, float]:
        """Smallest and largest."""
        return min(self.figures[name]), max(self.figures[name])


def compare(runs: Sequence[PeerRun]) -> list[Row]:
    """A row an arm, in the order in which arms appear; ratios are to the baseline of the same repeat."""
    bases = {run.repeat: run for run in runs if run.arm == BASELINE}
    probes = [run.full_tokens_per_s for run in runs if run.full_tokens_per_s is not None and run.arm != BASELINE]
    full = float(np.median(probes)) if probes else float("nan")
    rows = []
    for arm in dict.fromkeys(run.arm for run in runs):
        ours = [run for run in runs if run.arm == arm and run.repeat in bases]
        if ours:
            figures = {
                name: [figure(run, bases[run.repeat], run.full_tokens_per_s or full) for run in ours]
                for name, figure in _FIGURES.items()
            }
            rows.append(Row(arm, figures))
    return rows


def _if_logged(figure: np.ndarray | float | None) -> float:
    """Mean over steps; NaN: not logged."""
    return float("nan") if figure is None else float(np.mean(figure))


def _summary(figure: np.ndarray | None, of: Callable[[np.ndarray], float]) -> float:
    """``of`` the steps' values; NaN: not logged."""
    return float("nan") if figure is None else float(of(figure))


_ALL = slice(None)
_STEADY = slice(_FILLING, None)

_FIGURES: dict[str, Callable[[PeerRun, PeerRun, float], float]] = {
    "rollout_ms": lambda run, base, full: run.ms_per_1000(run.rollout_s, _ALL),
    "rollout_ratio": lambda run, base, full: (
        run.ms_per_1000(run.rollout_s, _ALL) / base.ms_per_1000(base.rollout_s, _ALL)
    ),
    "steady_rollout_ratio": lambda run, base, full: (
        run.ms_per_1000(run.rollout_s, _STEADY) / base.ms_per_1000(base.rollout_s, _STEADY)
    ),
    "step_ratio": lambda run, base, full: run.ms_per_1000(run.step_s, _ALL) / base.ms_per_1000(base.step_s, _ALL),
    "efficiency": lambda run, base, full: 1e6 / run.ms_per_1000(run.rollout_s, _ALL) / full,
    "steady_efficiency": lambda run, base, full: 1e6 / run.ms_per_1000(run.rollout_s, _STEADY) / full,
    "staleness_mean": lambda run, base, full: float(run.staleness.mean()),
    "tokens_per_s": lambda run, base, full: 1e6 / run.ms_per_1000(run.rollout_s, _ALL),
    "staleness_p95": lambda run, base, full: _if_logged(run.staleness_p95),
    "off_policy": lambda run, base, full: _if_logged(run.off_policy),
    "dropped": lambda run, base, full: float(run.dropped),
    "staleness_max": lambda run, base, full: float(run.staleness_max.max()),
    "first_length": lambda run, base, full: float(run.tokens[:_FIRST].sum() / base.tokens[:_FIRST].sum()),
    "reward": lambda run, base, full: float(run.reward[-len(run.reward) // 3 :].mean()),
    "held_out": lambda run, base, full: _if_logged(run.held_out),
    "tokens": lambda run, base, full: float(run.tokens.sum()),
    "interrupt_s": lambda run, base, full: _summary(run.interrupt_s, np.median),
    "interrupt_max_s": lambda run, base, full: _summary(run.interrupt_s, np.max),
    "stolen_cpu": lambda run, base, full: _if_logged(run.stolen_cpu),
}
"""by name: of a run, the baseline's run of the same repeat, and the engine's tokens/s kept full"""


def table_of(rows: Sequence[Row]) -> Table:
    """Medians over repeats, the spread of the main ratio, and the largest staleness of all."""

    def cells(row: Row) -> list[str]:
        low, high = row.spread("rollout_ratio")
        return [
            LABELS.get(row.arm, row.arm),
            f"{row.median('rollout_ms'):.0f}",
            f"{row.median('tokens_per_s'):,.0f}",
            f"{row.median('rollout_ratio'):.2f} ({low:.2f} to {high:.2f})",
            f"{row.median('steady_rollout_ratio'):.2f}",
            f"{row.median('step_ratio'):.2f}",
            f"{row.median('efficiency'):.2f}",
            f"{row.median('steady_efficiency'):.2f}",
            f"{row.median('staleness_mean'):.2f}",
            _or_dash(row.median("staleness_p95"), ".1f"),
            f"{row.spread('staleness_max')[1]:.0f}",
            _or_dash(row.median("off_policy"), ".2f"),
            f"{row.median('dropped'):.0f}",
            f"{row.median('first_length'):.2f}",
            f"{row.median('reward'):.3f}",
            _mean_and_error(row.figures["held_out"]),
            _or_dash(row.median("interrupt_s"), ".2f"),
            _or_dash(row.spread("interrupt_max_s")[1], ".2f"),
            _or_dash(row.median("stolen_cpu"), ".0%"),
        ]

    header = [
        "arm",
        "rollout ms / 1,000 trained tokens",
        "trained tokens / s",
        f"rollout / {BASELINE} (spread)",
        f"without first {_FILLING} steps",
        f"step / {BASELINE}",
        "efficiency",
        f"without first {_FILLING} steps",
        "staleness mean",
        "p95",
        "max",
        "off-policy tokens",
        "samples dropped",
        f"length of first {_FIRST} steps / {BASELINE}",
        "reward, last third",
        "held-out reward at the end, mean and standard error",
        "interruption, s: median",
        "max",
        "processor time that the host gave to others",
    ]
    return Table("Peers, medians over repeats", header, [cells(row) for row in rows])


def _plain(row: Row) -> dict[str, Any]:
    """For JSON, which has no NaN."""
    figures = {name: [None if np.isnan(v) else v for v in values] for name, values in row.figures.items()}
    return {"arm": row.arm, "figures": figures}


def _mean_and_error(values: Sequence[float]) -> str:
    if np.isnan(values).any():
        return "-"
    error = standard_errors(np.array(values)[:, None])[0]
    return f"{np.mean(values):.3f}" + ("" if np.isnan(error) else f" ± {error:.3f}")


def _or_dash(value: float, form: str) -> str:
    return "-" if np.isnan(value) else format(value, form)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Speed against staleness: an arm is better the lower and the further left it stands."""
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        x, y = row.median("staleness_mean"), row.median("rollout_ratio")
        low, high = row.spread("rollout_ratio")
        colour = "#0072B2" if row.arm.startswith("PR") else "#D55E00" if row.arm.startswith("v1") else "#555555"
        axes.errorbar(x, y, [[y - low], [high - y]], fmt="o", color=colour, capsize=3)
        axes.annotate(LABELS.get(row.arm, row.arm), (x, y), xytext=(6, 4), textcoords="offset points", fontsize=9)
    axes.set_xlabel("mean staleness of trained samples (versions)")
    axes.set_ylabel(f"rollout time per trained token, {BASELINE} = 1")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6")
    figure.savefig(path, dpi=110)
