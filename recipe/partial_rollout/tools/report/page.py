"""`report.html`: one file without links to others, with an interactive timeline of every run and the tables.

The timeline is drawn by `page_files/timeline.js`, of this project. A plotting library would add 1 to 5 MB to every report
(plotly's bundle), and draws each of 100,000 bars as an object of its own.
"""

import base64
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Template

from recipe.partial_rollout.tools.report.comparison import Comparison, Side
from recipe.partial_rollout.tools.report.findings import cautions, findings, headline
from recipe.partial_rollout.tools.report.picture import hue
from recipe.partial_rollout.tools.report.segments import segments_of
from recipe.partial_rollout.tools.report.table import tables

LONGEST_MS = 2**32 - 1
"""The page counts milliseconds in 32 bits: 49 days."""


def page(comparison: Comparison, panels: bytes, *, made: str) -> str:
    """The whole file.

    Args:
        panels: `report.png`.
        made: a line that says when and how the page was made.
    """
    runs = [_run_data(side, hue(index)) for index, side in enumerate(comparison.sides)]
    said, lead = findings(comparison), len(headline(comparison))
    return Template(_file("page.html"), autoescape=True, trim_blocks=True, lstrip_blocks=True).render(
        names=", ".join(side.name for side in comparison.sides),
        cautions=cautions(comparison),
        lead=said[:lead],
        findings=said[lead:],
        tools=any(of_tools for run in runs for *_, of_tools in run["lanes"]),
        separate=comparison.separate,
        tables=tables(comparison),
        warnings=comparison.warnings,
        panels=base64.b64encode(panels).decode(),
        made=made,
        runs=runs,
        style=_file("page.css"),
        script=_file("timeline.js"),
    )


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
            # A phase is drawn over those that it lies in.
            for phase in sorted(run.phases, key=lambda phase: (phase.step, phase.start - phase.end))
            if phase.end > origin
        ],
        "start": _column(start * 1e3, np.uint32),
        "length": _column(length * 1e3, np.uint32),
        "tokens": _column(segments.tokens, np.uint32),
        "version": _column(segments.version, np.int32),
        "sample": _column(segments.sample, np.uint32),
        "interrupted": _column(segments.interrupted, np.uint8),
    }


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else min(LONGEST_MS, max(0, round(seconds * 1e3)))


def _column(values: np.ndarray, kind: type[np.generic]) -> str:
    """Base64 of the little-endian numbers."""
    rounded = np.minimum(np.round(values), LONGEST_MS) if kind is np.uint32 else values
    return base64.b64encode(rounded.astype(np.dtype(kind).newbyteorder("<")).tobytes()).decode()


def _file(name: str) -> str:
    return (files("recipe.partial_rollout.tools.report") / "page_files" / name).read_text(encoding="utf-8").rstrip()
