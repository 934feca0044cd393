"""``metrics.jsonl``: what verl's file logger writes for each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from recipe.partial_rollout.records.fields import RunRecordError
from recipe.partial_rollout.records.jsonl import read_lines

NAME = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line: a training step, or the validation before the first step."""

    step: int
    values: dict[str, float] = field(repr=False)
    """metrics by verl's key; NaN, which verl logs as null, is left out"""

    @property
    def trained(self) -> bool:
        """Whether it is a training step."""
        return "training/global_step" in self.values


def read_metrics(path: Path) -> tuple[list[StepMetrics], list[str]]:
    """The lines in order, and a warning if the last one is torn.

    Raises:
        RunRecordError: the file cannot be read, or a line holds no metrics; names it.
    """
    lines, warnings = read_lines(path)
    found = []
    for line in lines:
        data = line.values.get("data")
        if not isinstance(data, dict):
            raise RunRecordError(
                f"{line.place}: 'data' is missing; it should hold the metrics that verl's file logger writes"
            )
        numbers = {key: float(value) for key, value in data.items() if isinstance(value, int | float)}
        found.append(StepMetrics(line.integer("step"), numbers))
    return found, warnings
