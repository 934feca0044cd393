"""Command line: reads run directories, prints the tables, and saves the report."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from recipe.partial_rollout.tools.command_line import Parser, typed
from recipe.partial_rollout.tools.reading.run_log import RunRecordError
from recipe.partial_rollout.tools.report.comparison import Comparison, as_json, compare
from recipe.partial_rollout.tools.report.findings import cautions, findings, headline
from recipe.partial_rollout.tools.report.page import page
from recipe.partial_rollout.tools.report.panels import draw_panels
from recipe.partial_rollout.tools.report.table import report_console, report_markdown
from recipe.partial_rollout.tools.report.timeline import draw_timeline
from recipe.partial_rollout.tools.run_record import load_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the report; exit code 2, as argparse's own, if a run cannot be read."""
    parser = Parser(
        typed("report"),
        "Compare runs, finished or still running: a page with an interactive timeline, tables, training curves.",
        [
            "outputs/quickstart/noPR outputs/quickstart/PR",
            "outputs/peers/noPR/seed_1 outputs/peers/PR_bounded/seed_1 --out outputs/peers/report",
        ],
        "Ratios are against the base: the first noPR run, or the first run if none is noPR.",
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="directory of a run, with run.jsonl and metrics.jsonl",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to save the report in (default: report/ in the directory of the last run)",
    )
    options = parser.parse_args(arguments)
    try:
        comparison = compare([load_run(directory) for directory in options.runs])
        out = options.out or Path(comparison.sides[-1].run.directory) / "report"
        saved = _save(comparison, out)
    except RunRecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report_console(comparison))
    print(f"\nsaved in {out}: {', '.join(saved)}")
    return 0


def _save(comparison: Comparison, out: Path) -> list[str]:
    """Write the report's files into ``out``; return their names.

    Raises:
        RunRecordError: a file cannot be written; the message names ``out``.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        title = "\n".join(headline(comparison))
        draw_timeline(comparison, title, out / "timeline.png")
        draw_panels(comparison, title, out / "report.png")
        (out / "report.md").write_text(report_markdown(comparison), encoding="utf-8")
        content = {"cautions": cautions(comparison), "findings": findings(comparison), **as_json(comparison)}
        (out / "report.json").write_text(json.dumps(content, indent=2, default=asdict) + "\n", encoding="utf-8")
        made = f"Made {time.strftime('%Y-%m-%d %H:%M:%S')} by python -m recipe.partial_rollout.tools report."
        whole = page(comparison, (out / "report.png").read_bytes(), made=made)
        (out / "report.html").write_text(whole, encoding="utf-8")
    except OSError as error:
        raise RunRecordError(f"{out}: the report cannot be written ({error.strerror}); give another --out") from error
    return ["report.html", "report.md", "report.json", "timeline.png", "report.png"]
