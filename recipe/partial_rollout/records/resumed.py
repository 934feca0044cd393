"""The event with which ledger and trace say that another life of the run begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run continues from the checkpoint of ``step``; what the lines before say of later steps is undone (0: all)."""

    EVENT: ClassVar[str] = "resumed"
    step: int
