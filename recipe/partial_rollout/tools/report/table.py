"""The report as text: markdown for the file, aligned columns for the console."""

from collections.abc import Sequence

from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.report.comparison import Comparison, Side, facts_of
from recipe.partial_rollout.tools.report.findings import cautions, findings
from recipe.partial_rollout.tools.report.rows import FIGURES, PHASES, SETTINGS, Figure
from recipe.partial_rollout.tools.report.summary import ratio
from recipe.partial_rollout.tools.table import Table


def report_markdown(comparison: Comparison, pictures: Sequence[str]) -> str:
    """`pictures` are file names beside the report, the first stands above the tables."""
    compared = "one run" if not comparison.others else f"{len(comparison.sides)} runs compared"
    parts = [f"# Partial rollout: {compared}", *(f"**{caution}.**" for caution in cautions(comparison))]
    parts += [*findings(comparison), _picture(pictures[0])]
    parts += [table.markdown() for table in tables(comparison)]
    if comparison.warnings:
        parts.append("## Warnings\n\n" + "\n".join(f"- {warning}" for warning in comparison.warnings))
    parts += [_picture(name) for name in pictures[1:]]
    return "\n\n".join(parts) + "\n"


def _picture(name: str) -> str:
    return f"![{name.removesuffix('.png')}]({name})"


def report_console(comparison: Comparison) -> str:
    lines = [*(f"CAUTION: {caution}." for caution in cautions(comparison)), *findings(comparison)]
    parts = ["\n".join(lines), *(table.console() for table in tables(comparison))]
    if comparison.warnings:
        parts.append("\n".join(f"warning: {warning}" for warning in comparison.warnings))
    return "\n\n".join(parts)


def tables(comparison: Comparison) -> list[Table]:
    """The tables of a report; each row has a note that says what it is."""
    work = [_work(comparison)] if comparison.others else []
    return [_figures(comparison), _phases(comparison), *work, _settings(comparison)]


def _header(comparison: Comparison, *after_value: str) -> list[str]:
    """A column for the base, then for each other run its value and its ratio to the base."""
    base, names = comparison.base.name, [contrast.side.name for contrast in comparison.others]
    return ["", base, *after_value, *(cell for name in names for cell in (name, *after_value, f"{name} / {base}"))]


def _figures(comparison: Comparison) -> Table:
    shown = [figure for figure in FIGURES if figure.always or any(_known(figure, comparison))]
    rows = []
    for figure in shown:
        row = [figure.label, figure.show(comparison.base.summary)]
        for contrast in comparison.others:
            against = units.decimal(contrast.ratios[figure.ratio]) if figure.ratio else ""
            row += [figure.show(contrast.side.summary), against]
        rows.append(row)
    return Table("Figures", _header(comparison), rows, [figure.means for figure in shown])


def _known(figure: Figure, comparison: Comparison) -> list[bool]:
    return [figure.show(side.summary) != units.UNKNOWN for side in comparison.sides]


def _phases(comparison: Comparison) -> Table:
    base = comparison.base
    rows, notes = [], []
    for name, (label, means) in PHASES.items():
        spent = base.summary.phases_s[name]
        if not any(side.summary.phases_s[name] for side in comparison.sides):
            continue
        if name == "gen" and any(side.run.settings.separate for side in comparison.sides):
            label += " (separate: wait)"
        row = [label, *_share_of_step(name, base)]
        for contrast in comparison.others:
            mine = contrast.side.summary.phases_s[name]
            row += [*_share_of_step(name, contrast.side), units.decimal(ratio(mine, spent))]
        rows.append(row)
        notes.append(means)
    total = ["step", units.seconds(base.summary.step_s), ""]
    for contrast in comparison.others:
        mine = contrast.side.summary.step_s
        total += [units.seconds(mine), "", units.decimal(ratio(mine, base.summary.step_s))]
    return Table(
        "Time per phase, whole run",
        _header(comparison, "of step"),
        [*rows, total],
        [*notes, "All of a step but validation; the sum of the phases above."],
    )


def _share_of_step(name: str, side: Side) -> tuple[str, str]:
    inside, seconds = name != "testing", side.summary.phases_s[name]
    return units.seconds(seconds), units.share(ratio(seconds, side.summary.step_s)) if inside else ""


def _work(comparison: Comparison) -> Table:
    works = [contrast.equal_work for contrast in comparison.others]
    names = [contrast.side.name for contrast in comparison.others]
    base = comparison.base.name
    answers = {
        "equally many trained groups": [work.trained_groups_equal for work in works],
        "the same prompts in the same epochs": [work.same_prompts for work in works],
        f"{base}: each prompt once in an epoch": [work.each_prompt_once[base] for work in works],
        "each prompt once in an epoch": [work.each_prompt_once[name] for work, name in zip(works, names, strict=True)],
    }
    rows = [[label, *("yes" if yes else "NO" for yes in held)] for label, held in answers.items()]
    differences = [difference for work in works for difference in work.differences]
    rows += [[f"- {difference}", *("" for _ in names)] for difference in differences]
    notes = [
        "Ratios per token compare runs that did equal work.",
        "As multisets of (epoch, prompt); the order does not matter.",
        "A prompt that an epoch trains twice counts twice in its gradient.",
        "A prompt that an epoch trains twice counts twice in its gradient.",
        *("" for _ in differences),
    ]
    return Table(f"Equal work, against {base}", ["holds for", *names], rows, notes)


def _settings(comparison: Comparison) -> Table:
    facts = [facts_of(side.run) for side in comparison.sides]
    rows = [[name, *(str(each[name]) for each in facts)] for name in SETTINGS]
    return Table("Runs", ["", *(side.name for side in comparison.sides)], rows, list(SETTINGS.values()))
