"""Groups whose samples have all finished, oldest birth first, then by dispatch: the order in which they are trained."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from recipe.partial_rollout.manager.types import PromptGroup


def _order(group: PromptGroup) -> int:
    return group.order


@dataclass(slots=True)
class ReadyGroups:
    """Groups by birth version; within one, in dispatch order."""

    by_birth: dict[int, list[PromptGroup]] = field(default_factory=dict)
    size: int = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[PromptGroup]:
        """Oldest birth first."""
        for birth in sorted(self.by_birth):
            yield from self.by_birth[birth]

    def add(self, group: PromptGroup) -> None:
        """Add ``group``, which has become ready."""
        assert group.birth is not None
        insort(self.by_birth.setdefault(group.birth, []), group, key=_order)
        self.size += 1

    def remove(self, group: PromptGroup) -> None:
        """Take out ``group``."""
        assert group.birth is not None
        groups = self.by_birth[group.birth]
        del groups[bisect_left(groups, group.order, key=_order)]
        if not groups:
            del self.by_birth[group.birth]
        self.size -= 1
