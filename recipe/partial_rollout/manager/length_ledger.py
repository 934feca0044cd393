"""Length bias: do trained responses have the lengths of the dispatched ones? Short ones finish first.

Filtered groups count on neither side: what dynamic sampling selects is no bias of the scheduling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LengthLedger:
    """Response tokens of every group by dispatch order; the first groups are kept only as a sum once as many are trained.

    >>> ledger = LengthLedger(opened=3)
    >>> ledger.leave_out(0)
    >>> ledger.close(1, 10)
    >>> ledger.total_of_first(2, so_far=lambda order: 7)
    17
    """

    opened: int = 0
    """groups dispatched"""
    prefix: int = 0
    """tokens of the first ``prefix_groups`` unfiltered groups in dispatch order"""
    prefix_groups: int = 0
    passed: int = 0
    """number of groups dispatched up to the end of the prefix, filtered ones included"""
    ended: dict[int, int] = field(default_factory=dict)
    """tokens of the ended groups after the prefix, by dispatch order"""
    left_out: set[int] = field(default_factory=set)
    """dispatch orders of the filtered groups after the prefix"""

    def open(self) -> None:
        """Note that one more group was dispatched."""
        self.opened += 1

    def close(self, order: int, tokens: int) -> None:
        """Note that the group dispatched as number ``order`` ended with ``tokens``."""
        self.ended[order] = tokens

    def leave_out(self, order: int) -> None:
        """Note that the group dispatched as number ``order`` was filtered."""
        self.left_out.add(order)

    def fold(self, groups: int) -> None:
        """Fold the first ``groups`` dispatched groups into the sum, up to the first that has not ended."""
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
        """Tokens of the first ``groups`` unfiltered groups dispatched; ``so_far(order)`` gives those of one in flight."""
        self.fold(groups)
        return self.prefix + self._total(0, groups - self.prefix_groups, so_far)

    def total_of_next(self, groups: int, after: int, so_far: Callable[[int], int]) -> int:
        """As ``total_of_first``, of the ``groups`` that follow the first ``after``."""
        self.fold(after)
        return self._total(after - self.prefix_groups, groups, so_far)

    def _total(self, skipped: int, groups: int, so_far: Callable[[int], int]) -> int:
        """Tokens of ``groups`` groups after the prefix and the ``skipped`` that follow it."""
        behind = (order for order in range(self.passed, self.opened) if order not in self.left_out)
        orders = itertools.islice(behind, skipped, skipped + groups)
        return sum(so_far(i) if (tokens := self.ended.get(i)) is None else tokens for i in orders)
