"""`report.html`: one file without links to others, with an interactive timeline of every run and the tables.

The timeline is drawn by `page_files/timeline.js`, of this project. A plotting library would add 1 to 5 MB to every report
(plotly's bundle), and draws each of 100,000 bars as an object of its own.
"""

import base64
import html
import json
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np

from recipe.partial_rollout.records.run_log import Phase, PhaseName
from recipe.partial_rollout.tools.report.comparison import Comparison, Side
from recipe.partial_rollout.tools.report.findings import cautions, findings, headline
from recipe.partial_rollout.tools.report.picture import TOOLS_COLOUR, hue
from recipe.partial_rollout.tools.report.segments import segments_of
from recipe.partial_rollout.tools.report.table import tables
from recipe.partial_rollout.tools.table import Table

LONGEST_MS = 2**32 - 1
"""The page counts milliseconds in 32 bits: 49 days."""

PHASE_ORDER: tuple[str, ...] = (
    PhaseName.WAIT,
    PhaseName.TRAIN,
    PhaseName.VALIDATE,
    PhaseName.SYNC,
    PhaseName.STAGE,
    PhaseName.HOLD,
)
"""A phase is drawn over those before it, which it may lie in; others last."""
TOOLS_LEGEND = f'\n<i style="background:{TOOLS_COLOUR}"></i> between two turns, in tools, below the slots'
SEPARATE_LEGEND = (
    '\n<i style="background:#7fb08a"></i> staging weights <i style="background:#111"></i> all engines held. '
    "Where the trainer has the colour of empty slots, it waits."
)


def page(comparison: Comparison, panels: bytes, *, made: str) -> str:
    """The whole file.

    Args:
        panels: `report.png`.
        made: a line that says when and how the page was made.
    """
    names = [side.name for side in comparison.sides]
    runs = [_run_data(side, hue(index)) for index, side in enumerate(comparison.sides)]
    said, lead = findings(comparison), len(headline(comparison))
    content = {
        "title": html.escape(f"Partial rollout: {', '.join(names)}"),
        "cautions": "\n".join(f'<p class="caution"><b>{html.escape(line)}.</b></p>' for line in cautions(comparison)),
        "tools": TOOLS_LEGEND if any(of_tools for run in runs for *_, of_tools in run["lanes"]) else "",
        "separate": SEPARATE_LEGEND if comparison.separate else "",
        "lead": "\n".join(f'<p class="lead">{html.escape(line)}</p>' for line in said[:lead]),
        "findings": "\n".join(f"<p>{html.escape(line)}</p>" for line in said[lead:]),
        "tables": "\n".join(table_html(table) for table in tables(comparison)),
        "warnings": _warnings(comparison.warnings),
        "panels": base64.b64encode(panels).decode(),
        "made": html.escape(made),
        # A script element ends at the first "</", wherever it stands.
        "data": json.dumps(runs, separators=(",", ":")).replace("</", "<\\/"),
        "style": _file("page.css"),
        "script": _file("timeline.js"),
    }
    return Template(_file("page.html")).substitute(content)


def table_html(table: Table) -> str:
    """The table with its notes: of a row below its label, of columns below the table."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    notes = table.notes or [""] * len(table.rows)
    rows = []
    for (label, *cells), note in zip(table.rows, notes, strict=True):
        small = f"<small>{html.escape(note)}</small>" if note else ""
        rows.append(
            f"<tr><td>{html.escape(label)}{small}</td>{''.join(f'<td>{html.escape(c)}</td>' for c in cells)}</tr>"
        )
    body = "\n".join(rows)
    about = f'\n<p class="note">{html.escape(" ".join(table.about))}</p>' if table.about else ""
    whole = f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
    return f"<h2>{html.escape(table.title)}</h2>\n{whole}{about}"


def _warnings(warnings: list[str]) -> str:
    items = "\n".join(f"<li>{html.escape(warning)}</li>" for warning in warnings)
    return f"<h2>Warnings</h2>\n<ul>\n{items}\n</ul>" if warnings else ""


def _run_data(side: Side, colour: str) -> dict[str, Any]:
    """What the timeline of a run needs; times in ms from its first round."""
    run = side.run
    origin = run.start
    segments = segments_of(run)
    start = np.maximum(segments.start - origin, 0.0)
    length = np.maximum(segments.end - origin, start) - start
    state = "" if run.complete else ", not complete"
    calls = sum(count for _, _, count, tools in segments.lanes if not tools)
    sizes = f"{len(run.steps):,} steps, {calls:,} segments"
    return {
        "title": f"{side.name}: {run.settings.experiment}, {sizes}{state}",
        "colour": colour,
        "ends": _ms(run.end - origin),
        "lanes": segments.lanes,
        "samples": segments.samples,
        "rounds": [
            [
                round_.step,
                round_.version,
                *map(
                    _ms, (round_.phase.start - origin, round_.phase.end - origin, round_.interrupt_s, round_.resume_s)
                ),
                round_.carried_groups,
            ]
            for round_ in run.rounds
        ],
        "phases": [
            [phase.name, phase.step, _ms(phase.start - origin), _ms(phase.end - origin)]
            for phase in sorted(run.phases, key=_drawn)
            if phase.end > origin
        ],
        "start": _column(start * 1e3, np.uint32),
        "length": _column(length * 1e3, np.uint32),
        "tokens": _column(segments.tokens, np.uint32),
        "version": _column(segments.version, np.int32),
        "sample": _column(segments.sample, np.uint32),
        "interrupted": _column(segments.interrupted, np.uint8),
    }


def _drawn(phase: Phase) -> tuple[int, int]:
    """Its place in the order of drawing."""
    return phase.step, PHASE_ORDER.index(phase.name) if phase.name in PHASE_ORDER else len(PHASE_ORDER)


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else min(LONGEST_MS, max(0, round(seconds * 1e3)))


def _column(values: np.ndarray, kind: type[np.generic]) -> str:
    """Base64 of the little-endian numbers."""
    rounded = np.minimum(np.round(values), LONGEST_MS) if kind is np.uint32 else values
    return base64.b64encode(rounded.astype(np.dtype(kind).newbyteorder("<")).tobytes()).decode()


def _file(name: str) -> str:
    return (files("recipe.partial_rollout.tools.report") / "page_files" / name).read_text(encoding="utf-8").rstrip()
