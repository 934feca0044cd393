"""Whether training sees the lengths that were dispatched: short responses finish first, so early batches are biased.

Groups that dynamic sampling filters are left out on both sides: what it selects is no bias of the scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LengthLedger:
    """Response tokens of every group by dispatch order; the first ones, once trained as many, only as a sum.

    >>> ledger = LengthLedger(opened=3)
    >>> ledger.leave_out(0)
    >>> ledger.close(1, 10)
    >>> ledger.total_of_first(2, so_far=lambda order: 7)
    17
    """

    opened: int = 0
    """groups dispatched"""
    prefix: int = 0
    """tokens of the first ``prefix_groups`` dispatched that were not filtered"""
    prefix_groups: int = 0
    passed: int = 0
    """groups dispatched up to the end of the prefix, filtered ones included"""
    ended: dict[int, int] = field(default_factory=dict)
    """tokens of the groups that have ended and are not in the prefix"""
    left_out: set[int] = field(default_factory=set)
    """orders of the filtered groups behind the prefix"""

    def open(self) -> None:
        """One more group was dispatched."""
        self.opened += 1

    def close(self, order: int, tokens: int) -> None:
        """The group dispatched as number ``order`` ended with ``tokens``."""
        self.ended[order] = tokens

    def leave_out(self, order: int) -> None:
        """The group dispatched as number ``order`` was filtered."""
        self.left_out.add(order)

    def fold(self, groups: int) -> None:
        """Sum up those of the first ``groups`` dispatched that have ended, up to the first that has not."""
        while self.prefix_groups < groups:
            if self.passed in self.left_out:
                self.left_out.remove(self.passed)
            elif self.passed in self.ended:
                self.prefix += self.ended.pop(self.passed)
                self.prefix_groups += 1
            else:
                return
            self.passed += 1

    def total_of_first(self, groups: int, so_far: Callable[[int], int]) -> int:
        """Tokens of the first ``groups`` dispatched and not filtered; ``so_far(order)`` answers for one in flight."""
        self.fold(groups)
        behind = (order for order in range(self.passed, self.opened) if order not in self.left_out)
        pending = [order for order, _ in zip(behind, range(groups - self.prefix_groups), strict=False)]
        return self.prefix + sum(so_far(i) if (tokens := self.ended.get(i)) is None else tokens for i in pending)
