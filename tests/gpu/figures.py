"""Figures of an experiment: one JSON line each, printed and kept as soon as it is measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "figures.jsonl"


class Figures:
    """Prints each figure, and appends it to ``OUT/figures.jsonl``: what was measured outlives a run that is cut off."""

    def __init__(self, experiment: str, out: Path) -> None:
        self._experiment, self._path = experiment, out / NAME
        out.mkdir(parents=True, exist_ok=True)

    def emit(self, **values: Any) -> None:
        """Print and keep one figure."""
        line = json.dumps({"experiment": self._experiment, **values})
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")


def read(folders: list[Path]) -> Iterator[dict[str, Any]]:
    """Every figure below ``folders``; a last line that was cut off is left out."""
    for folder in folders:
        for path in sorted(folder.rglob(NAME)):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    yield json.loads(line)
