"""``peers.md``, ``peers.json`` and ``peers.png``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from recipe.partial_rollout.records.run_log import NAME, RunSettings
from recipe.partial_rollout.tools.reading.run_log import read_log
from recipe.partial_rollout.tools.table import Table
from tests.studies.arm import BASELINE
from tests.studies.held_out import QUALITY
from tests.studies.peers.arms import CAPTIONS
from tests.studies.peers.figures import FILLING, FIRST, Row, compare, read_rows, write_rows
from tests.studies.peers.run import PeerRun, read_run
from tests.studies.picture import BASELINE_HUE, DPI, OTHERS_HUE, OURS_HUE, plain
from tests.studies.runner import Study
from tests.studies.spread import standard_errors, with_error


def report(study: Study, options: Namespace, docs: Path) -> Table:
    """The table, saved in ``docs`` with its figures and the picture.

    Raises:
        ValueError: there is no complete run of the baseline, or a run lacks a figure.
    """
    rows = read_rows(options.figures) if options.figures else compare(read_runs(study))
    table = table_of(rows)
    (docs / "peers.md").write_text(table.markdown() + "\n")
    write_rows(rows, docs / "peers.json")
    draw(rows, docs / "peers.png")
    return table


def read_runs(study: Study) -> list[PeerRun]:
    """Every complete run.

    Raises:
        ValueError: the baseline has none.
    """
    finished = study.finished()
    samples = _samples_per_step(study)
    return [read_run(study.directory(arm, seed), arm.name, seed, samples) for arm, seed in finished]


def _samples_per_step(study: Study) -> int:
    """From the first run of the recipe's own trainer: all arms have the same batches."""
    for path in sorted(study.out.glob(f"*/seed_*/{NAME}")):
        settings = next(event for event in read_log(path.parent, []) if isinstance(event, RunSettings))
        return settings.batch_groups * settings.samples_per_group
    raise ValueError(f"no run of the recipe's own trainer in {study.out}")


def table_of(rows: Sequence[Row]) -> Table:
    """Medians over seeds, the spread of the main ratio, and the largest staleness."""
    return Table.of("Peers, medians over repeats", rows, _COLUMNS)


def _median(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: _or_dash(row.median(name), form)


def _largest(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: _or_dash(row.spread(name)[1], form)


def _mean_and_error(values: Sequence[float]) -> str:
    if np.isnan(values).any():
        return "-"
    error = standard_errors(np.array(values)[:, None])[0]
    return with_error(float(np.mean(values)), error)


def _with_spread(row: Row, name: str) -> str:
    """Median, lowest and highest."""
    low, high = row.spread(name)
    return "-" if np.isnan(low) else f"{row.median(name):.2f} ({low:.2f} to {high:.2f})"


def _or_dash(value: float, form: str) -> str:
    return "-" if np.isnan(value) else format(value, form)


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("arm", lambda row: CAPTIONS.get(row.arm, row.arm)),
    ("wall ms / 1,000 trained tokens, first batch to last", _median("wall_ms", ".0f")),
    (f"the same / {BASELINE.name} (spread)", lambda row: _with_spread(row, "wall_ratio")),
    ("trainer without a batch", _median("trainer_waits", ".0%")),
    ("engines held for weights", _median("engines_held", ".1%")),
    ("rollout ms / 1,000 trained tokens", _median("rollout_ms", ".0f")),
    ("trained tokens / s", _median("tokens_per_s", ",.0f")),
    (f"rollout / {BASELINE.name} (spread)", lambda row: _with_spread(row, "rollout_ratio")),
    (f"without first {FILLING} steps", _median("steady_rollout_ratio", ".2f")),
    (f"step / {BASELINE.name}", _median("step_ratio", ".2f")),
    ("efficiency", _median("efficiency", ".2f")),
    (f"without first {FILLING} steps", _median("steady_efficiency", ".2f")),
    ("staleness mean", _median("staleness_mean", ".2f")),
    ("p95", _median("staleness_p95", ".1f")),
    ("max", _largest("staleness_max", ".0f")),
    ("off-policy tokens", _median("off_policy", ".2f")),
    ("samples dropped", _median("dropped", ".0f")),
    (f"length of first {FIRST} steps / {BASELINE.name}", _median("first_length", ".2f")),
    ("reward, last third", _median("reward", ".3f")),
    (
        "held-out reward at the end, mean and standard error",
        lambda row: _mean_and_error(row.values("held_out")),
    ),
    (f"training seconds to held-out {QUALITY:g}", _median("quality_s", ".0f")),
    (f"the same / {BASELINE.name}", _median("quality_ratio", ".2f")),
    ("interruption, s: median", _median("interrupt_s", ".2f")),
    ("max", _largest("interrupt_max_s", ".2f")),
    ("processor time that the host gave to others", _median("stolen_cpu", ".0%")),
)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Speed against staleness: an arm is better the lower and the further left it stands.

    Speed is rollout time, and wall time where engines of an arm decode while the trainer updates.
    """
    separate = any(np.isnan(row.median("rollout_ratio")) for row in rows)
    ratio, meaning = ("wall_ratio", "wall time") if separate else ("rollout_ratio", "rollout time")
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        x, y = row.median("staleness_mean"), row.median(ratio)
        low, high = row.spread(ratio)
        colour = OURS_HUE if row.arm.startswith("PR") else OTHERS_HUE if row.arm.startswith("v1") else BASELINE_HUE
        axes.errorbar(x, y, [[y - low], [high - y]], fmt="o", color=colour, capsize=3)
        axes.annotate(CAPTIONS.get(row.arm, row.arm), (x, y), xytext=(6, 4), textcoords="offset points", fontsize=9)
    axes.set_xlabel("mean staleness of trained samples (versions)")
    axes.set_ylabel(f"{meaning} per trained token, {BASELINE.name} = 1")
    axes.set_ylim(bottom=0)
    plain(axes)
    figure.savefig(path, dpi=DPI)
