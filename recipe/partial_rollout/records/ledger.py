"""``ledger.jsonl``: the account of every prompt of a training. ``tools audit`` judges it.

A run that resumes appends to the file of the run before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from recipe.partial_rollout.manager.types import FilteredGroup
from recipe.partial_rollout.records.jsonl import (
    Checkpoint,
    JsonLines,
    Positive,
    Resumed,
    event_line,
)
from recipe.partial_rollout.records.trained_group import TrainedGroup


@dataclass(frozen=True, slots=True)
class RunSizes:
    """Sizes of a run: the first event of each process that starts or continues the training."""

    EVENT: ClassVar[str] = "run"
    arm: str
    """``PR`` or ``noPR``"""
    samples_per_group: int
    batch_groups: int
    """N"""
    max_staleness: int
    epoch_prompts: Positive
    """prompts trained in an epoch"""
    total: int
    """prompts that the whole training trains, over its epochs"""
    offered: int
    """prompts that may be admitted: more than ``total`` if the training ends with prompts in flight (``drain=False``)
    or filters groups"""
    filters: bool = False
    """whether groups may be filtered: then more than ``total`` prompts are consumed, of which ``total`` are trained"""
    drains: bool = True
    """whether nothing is left in flight once the training reaches its last step"""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Groups admitted in the rollout of ``step`` under policy ``version``."""

    EVENT: ClassVar[str] = "admitted"
    step: int
    version: int
    uids: list[str]


@dataclass(frozen=True, slots=True)
class Filtered:
    """Groups that dynamic sampling consumed in the rollout of ``step`` without training them."""

    EVENT: ClassVar[str] = "filtered"
    step: int
    version: int
    groups: list[FilteredGroup]


@dataclass(frozen=True, slots=True)
class Trained:
    """Groups that the update of ``step`` trained."""

    EVENT: ClassVar[str] = "trained"
    step: int
    version: int
    """policy version that the update started from"""
    groups: list[TrainedGroup]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The process ended on purpose after ``step``, before the training was over."""

    EVENT: ClassVar[str] = "stopped"
    step: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The training is over."""

    EVENT: ClassVar[str] = "complete"
    exhausted: bool = False
    """whether it ended because the data could not fill another batch"""


LedgerEvent = RunSizes | Resumed | Admitted | Filtered | Trained | Checkpoint | Stopped | Complete


def to_json(event: LedgerEvent) -> dict[str, Any]:
    """The event's line."""
    if isinstance(event, Trained):
        return {**event_line(replace(event, groups=[])), "groups": [group.to_ledger() for group in event.groups]}
    return event_line(event)


NAME = "ledger.jsonl"


class Ledger:
    """Appends to the ledger of one run directory (created if missing)."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = JsonLines(run_dir / NAME)

    def add(self, event: LedgerEvent, *, sync: bool = False) -> None:
        """Note ``event``; ``sync``: every line is on disk afterwards."""
        self._lines.add(to_json(event))
        if sync:
            self._lines.sync()
