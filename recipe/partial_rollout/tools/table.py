"""A table of figures as text: markdown for a file, aligned columns for the console."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rich import table as rich_table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text

_UNLIMITED = 10_000
"""characters of a line in a file or a pipe"""


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    """The first column is text, the others are figures."""
    notes: list[str] = field(default_factory=list)
    """The meaning of each row, or empty; shown by the HTML report only."""
    about: list[str] = field(default_factory=list)
    """The meaning of each column in a sentence, or empty; shown below the table, by the HTML report only."""

    @classmethod
    def of(cls, title: str, rows: Iterable[Any], columns: Sequence[tuple[str, Callable[[Any], str]]]) -> Self:
        """A line for each of ``rows``; ``columns``: what each is called, and its cell of a row."""
        return cls(title, [name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows])

    def markdown(self) -> str:
        return f"## {self.title}\n\n" + "\n".join(
            # A name that the user chose may contain a vertical bar, which would end the cell.
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
            for cells in (self.header, ["---"] + ["---:"] * (len(self.header) - 1), *self.rows)
        )

    def console(self) -> str:
        """Aligned columns; a terminal that is too narrow for the table has lines broken within cells."""
        console = Console(width=None if sys.stdout.isatty() else _UNLIMITED)
        with console.capture() as captured:
            console.print(self._shown())
        return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())

    def _shown(self) -> rich_table.Table:
        shown = rich_table.Table(title=Text(self.title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column, name in enumerate(self.header):
            # A Text is shown as is; in a string, square brackets would be markup.
            shown.add_column(Text(name), justify="right" if column else "left")
        for row in self.rows:
            shown.add_row(*map(Text, row))
        return shown
