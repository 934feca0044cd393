"""Command line: compares two run directories, prints the tables, and saves the report."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from recipe.partial_rollout.records.fields import RunRecordError
from recipe.partial_rollout.records.run_record import load_run
from recipe.partial_rollout.tools.command_line import described
from recipe.partial_rollout.tools.report.comparison import Comparison, as_json, compare
from recipe.partial_rollout.tools.report.findings import findings, headline
from recipe.partial_rollout.tools.report.panels import draw_panels
from recipe.partial_rollout.tools.report.table import report_console, report_markdown
from recipe.partial_rollout.tools.report.timeline import close_up, draw_timeline

BAD_INPUT = 2
"""Exit status, as argparse's own."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        comparison = compare(load_run(options.dir_a), load_run(options.dir_b))
        out = options.out or Path(comparison.other.run.directory) / "report"
        saved = _save(comparison, out)
    except RunRecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    print(report_console(comparison, findings(comparison)))
    print(f"\nsaved in {out}: {', '.join(saved)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        **described(
            "report",
            "Compare two finished runs: tables, a timeline and training curves.",
            "outputs/quickstart/noPR outputs/quickstart/PR",
            "outputs/peers/noPR/seed_1 outputs/peers/PR_bounded/seed_1 --out outputs/peers/report",
            more="noPR is the baseline, whichever comes first. Of two runs of one arm, it is DIR_A.",
        )
    )
    parser.add_argument(
        "dir_a", type=Path, metavar="DIR_A", help="directory of a run, with run.json, metrics.jsonl and trace.jsonl"
    )
    parser.add_argument("dir_b", type=Path, metavar="DIR_B", help="directory of the other run")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to save (default: report/ in the directory of the compared run)"
    )
    return parser


def _save(comparison: Comparison, out: Path) -> list[str]:
    """The names of the files it wrote."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        pictures = _draw(comparison, out)
        (out / "report.md").write_text(report_markdown(comparison, findings(comparison), pictures), encoding="utf-8")
        content = {"findings": findings(comparison), **as_json(comparison)}
        (out / "report.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunRecordError(f"{out}: the report cannot be written ({error.strerror}); give another --out") from error
    return ["report.md", "report.json", *pictures]


def _draw(comparison: Comparison, out: Path) -> list[str]:
    draw_timeline(comparison, headline(comparison), out / "timeline.png")
    draw_panels(comparison, headline(comparison), out / "report.png")
    if (close := close_up(comparison)) is None:
        return ["timeline.png", "report.png"]
    rounds = close.base.run.rounds
    draw_timeline(close, f"Close up: rounds {rounds[0].step} to {rounds[-1].step}", out / "timeline_close.png")
    return ["timeline.png", "timeline_close.png", "report.png"]
