"""The event in ledger and trace that marks a resume: another process of the run begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run continues from the checkpoint of ``step``; earlier lines about later steps are undone (0: all of them)."""

    EVENT: ClassVar[str] = "resumed"
    step: int
