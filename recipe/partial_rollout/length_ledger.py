"""Whether training sees the lengths that were dispatched: short responses finish first, so early batches are biased."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LengthLedger:
    """Response tokens of every group, by dispatch order."""

    final: list[int | None] = field(default_factory=list)
    prefix: int = 0
    prefix_groups: int = 0

    def open(self) -> None:
        """One more group was dispatched."""
        self.final.append(None)

    def close(self, order: int, tokens: int) -> None:
        """The group dispatched as number ``order`` ended with ``tokens``."""
        self.final[order] = tokens

    def total_of_first(self, groups: int, so_far: Callable[[int], int]) -> int:
        """Tokens of the first ``groups`` dispatched; ``so_far(order)`` answers for one that has not ended."""
        while self.prefix_groups < groups and self.final[self.prefix_groups] is not None:
            self.prefix += self.final[self.prefix_groups] or 0
            self.prefix_groups += 1
        pending = range(self.prefix_groups, groups)
        return self.prefix + sum(so_far(i) if (tokens := self.final[i]) is None else tokens for i in pending)
