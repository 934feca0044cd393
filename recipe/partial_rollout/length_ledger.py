"""Whether training sees the lengths that were dispatched: short responses finish first, so early batches are biased."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LengthLedger:
    """Response tokens of every group by dispatch order; the first ones, once trained as many, only as a sum."""

    opened: int = 0
    """groups dispatched"""
    prefix: int = 0
    """tokens of the first ``prefix_groups`` dispatched"""
    prefix_groups: int = 0
    ended: dict[int, int] = field(default_factory=dict)
    """tokens of the groups that have ended and are not in the prefix"""

    def open(self) -> None:
        """One more group was dispatched."""
        self.opened += 1

    def close(self, order: int, tokens: int) -> None:
        """The group dispatched as number ``order`` ended with ``tokens``."""
        self.ended[order] = tokens

    def fold(self, groups: int) -> None:
        """Sum up those of the first ``groups`` dispatched that have ended, up to the first that has not."""
        while self.prefix_groups < groups and self.prefix_groups in self.ended:
            self.prefix += self.ended.pop(self.prefix_groups)
            self.prefix_groups += 1

    def total_of_first(self, groups: int, so_far: Callable[[int], int]) -> int:
        """Tokens of the first ``groups`` dispatched; ``so_far(order)`` answers for one that has not ended."""
        self.fold(groups)
        pending = range(self.prefix_groups, groups)
        return self.prefix + sum(so_far(i) if (tokens := self.ended.get(i)) is None else tokens for i in pending)
