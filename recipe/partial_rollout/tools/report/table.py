"""The report as text: markdown for the file, aligned columns for the console."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from recipe.partial_rollout.records.run_log import Arm, RunSettings
from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.report.comparison import Comparison, Side
from recipe.partial_rollout.tools.report.findings import cautions, findings
from recipe.partial_rollout.tools.report.summary import METRICS, PHASES, ratio
from recipe.partial_rollout.tools.table import Table

SETTINGS = {
    "experiment": "trainer.experiment_name",
    "policy": "Which samples get slots first: partial_rollout.scheduling.policy.",
    "overtake": "How far a group may overtake an older one, as a share of a batch: partial_rollout.scheduling.overtake.",
    "max_staleness": "Bound on staleness, in policy versions.",
    "batch_groups": "Groups that a step trains.",
    "samples_per_group": "Samples of each prompt: rollout.n.",
    "replicas": "Engine replicas.",
    "slots_per_replica": "Samples that one replica runs at a time.",
    "full_concurrency": "Running samples when no slot is wasted: a whole batch, or all slots if the batch is larger.",
    "verl": "Version of verl.",
}
"""Row of the table of settings, and what it is."""


RUN_COLUMNS: tuple[tuple[str, Callable[[Side], str], str], ...] = (
    ("run", lambda side: side.name, "Type of the run (noPR or PR), or its directory if types repeat."),
    ("mode", lambda side: _mode(side.run.settings), "noPR: verl's synchronous rollout; else partial_rollout.mode."),
    (
        "trainer, engine",
        lambda side: _engines(side.run.settings),
        "Strategy of verl's actor; vLLM's version; whether trainer and engines take turns on the same devices.",
    ),
    ("steps", lambda side: _steps(side), "Steps that have both a round in run.jsonl and timers in metrics.jsonl."),
    (
        "time, h:mm",
        lambda side: units.hours(side.summary.total_s),
        "Time of steps and validations, without the pauses before resumes.",
    ),
    *(
        (f"{kind}@k", lambda side, kind=kind: side.summary.validation.shown(kind), means)
        for kind, means in {
            "mean": "Mean accuracy of the last validation, over data sources and k responses: verl's val-core. "
            "Mean reward if the reward function returns no accuracy.",
            "best": "Accuracy of the best of k responses; verl logs none for k = 1.",
            "maj": "Accuracy of the answer that most of k responses give; only if the reward function returns `pred`.",
        }.items()
    ),
    ("at step", lambda side: units.count(side.summary.validation.step), "Step of that validation."),
    (
        "empty slots",
        lambda side: units.share(side.summary.bubble_fraction),
        "The bubble: share of slots that were empty during rollout, of those that a whole batch can fill.",
    ),
    (
        "devices busy",
        lambda side: units.share(side.summary.device_use),
        "Share of rollout time in which a kernel ran on the GPUs of the driver's node, by NVML.",
    ),
    (
        "staleness, mean / p95 / max",
        lambda side: units.spread(side.summary.staleness),
        "Policy versions from a trained sample's first token to the update that trains it.",
    ),
)
"""Columns of the table of runs: what each is called, its cell, and what it is."""


def report_markdown(comparison: Comparison) -> str:
    """Return `report.md`, which shows `timeline.png` above the tables and `report.png` below; both must lie beside
    it."""
    compared = "one run" if not comparison.others else f"{len(comparison.sides)} runs compared"
    parts = [f"# Partial rollout: {compared}", *(f"**{caution}.**" for caution in cautions(comparison))]
    parts += [*findings(comparison), "![timeline](timeline.png)"]
    parts += [table.markdown() for table in tables(comparison)]
    if comparison.warnings:
        parts.append("## Warnings\n\n" + "\n".join(f"- {warning}" for warning in comparison.warnings))
    return "\n\n".join([*parts, "![report](report.png)"]) + "\n"


def report_console(comparison: Comparison) -> str:
    lines = [*(f"CAUTION: {caution}." for caution in cautions(comparison)), *findings(comparison)]
    parts = ["\n".join(lines), *(table.console() for table in tables(comparison))]
    if comparison.warnings:
        parts.append("\n".join(f"warning: {warning}" for warning in comparison.warnings))
    return "\n\n".join(parts)


def tables(comparison: Comparison) -> list[Table]:
    """Return the tables of a report.

    Notes explain the rows of metrics, phases and settings, and the columns of the runs. Validations have none.
    """
    return [
        _runs(comparison),
        *_validations(comparison),
        _figures(comparison),
        _phases(comparison),
        _settings(comparison),
    ]


def _runs(comparison: Comparison) -> Table:
    """A line a run."""
    table = Table.of("Runs", comparison.sides, [(name, cell) for name, cell, _ in RUN_COLUMNS])
    return replace(table, about=[f"{name}: {it}" for name, _, it in RUN_COLUMNS])


def _mode(settings: RunSettings) -> str:
    return str(settings.arm) if settings.arm is Arm.NOPR else f"{settings.arm}, {settings.mode}"


def _engines(settings: RunSettings) -> str:
    shared = "separate" if settings.separate else "in turn"
    vllm = f"vLLM {settings.vllm}{' (not tested)' if settings.untested else ''}"
    return f"{settings.trainer or units.UNKNOWN}, {vllm}, {shared}"


def _steps(side: Side) -> str:
    return f"{units.count(side.summary.steps)}{'' if side.run.complete else ' so far'}"


def _validations(comparison: Comparison) -> list[Table]:
    """A line for each data source and kind of score, if a run validates several sources."""
    scores = [side.summary.validation.scores for side in comparison.sides]
    found = {(source, kind) for of_run in scores for kind, by_source in of_run.items() for source in by_source}
    if len({source for source, _ in found}) < 2:
        return []
    rows = [
        [f"{source}, {kind}", *(units.precise(of_run.get(kind, {}).get(source)) for of_run in scores)]
        for source, kind in sorted(found)
    ]
    return [Table("Last validation, by data source", ["", *(side.name for side in comparison.sides)], rows)]


def _row(label: str, cells: Sequence[str], against: Iterable[str]) -> list[str]:
    """A label, the base's cell, and that of each other run with its ratio to the base."""
    base, *others = cells
    return [label, base, *chain.from_iterable(zip(others, against, strict=True))]


def _header(comparison: Comparison) -> list[str]:
    names = [side.name for side in comparison.sides]
    return _row("", names, [f"{name} / {names[0]}" for name in names[1:]])


def _figures(comparison: Comparison) -> Table:
    rows, notes = [], []
    for name, metric in METRICS.items():
        values = [getattr(side.summary, name) for side in comparison.sides]
        if metric.label and any(value is not None for value in values):
            ratios = [units.decimal(each.ratios[name]) if metric.compared else "" for each in comparison.others]
            rows.append(_row(metric.label, list(map(metric.words, values)), ratios))
            notes.append(metric.means)
    return Table("Metrics", _header(comparison), rows, notes)


def _phases(comparison: Comparison) -> Table:
    rows, notes = [], []
    for name, (label, means) in PHASES.items():
        spent = [side.summary.phases_s[name] for side in comparison.sides]
        if any(spent):
            ratios = [units.decimal(ratio(each, spent[0])) for each in spent[1:]]
            rows.append(_row(label, list(map(units.seconds, spent)), ratios))
            notes.append(means)
    return Table("Time per phase, whole run", _header(comparison), rows, notes)


def _settings(comparison: Comparison) -> Table:
    rows = [[name, *(str(getattr(side.run.settings, name)) for side in comparison.sides)] for name in SETTINGS]
    return Table("Settings", ["", *(side.name for side in comparison.sides)], rows, list(SETTINGS.values()))
