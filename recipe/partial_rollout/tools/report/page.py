"""`report.html`: one file without links to others, with an interactive timeline of every run and the tables.

The timeline is drawn by `page_files/timeline.js`, of this project. A plotting library would add 1 to 5 MB to every report
(plotly's bundle), and draws each of 100,000 bars as an object of its own.
"""

import base64
from importlib.resources import files

from jinja2 import Template

from recipe.partial_rollout.tools.report.comparison import Comparison
from recipe.partial_rollout.tools.report.findings import cautions, findings, headline
from recipe.partial_rollout.tools.report.picture import hue
from recipe.partial_rollout.tools.report.segments import drawn
from recipe.partial_rollout.tools.report.table import tables


def page(comparison: Comparison, panels: bytes, *, made: str) -> str:
    """The whole file.

    Args:
        panels: `report.png`.
        made: a line that says when and how the page was made.
    """
    runs = [
        {"title": f"{side.name}: {side.run.settings.experiment}", "colour": hue(at), **drawn(side.run)}
        for at, side in enumerate(comparison.sides)
    ]
    sentences, lead = findings(comparison), len(headline(comparison))
    return Template(_file("page.html"), autoescape=True, trim_blocks=True, lstrip_blocks=True).render(
        names=", ".join(side.name for side in comparison.sides),
        cautions=cautions(comparison),
        lead=sentences[:lead],
        findings=sentences[lead:],
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


def _file(name: str) -> str:
    return (files("recipe.partial_rollout.tools.report") / "page_files" / name).read_text(encoding="utf-8").rstrip()
