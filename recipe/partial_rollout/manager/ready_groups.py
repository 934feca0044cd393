"""Groups whose samples have all finished, oldest birth first: the order in which they are trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from recipe.partial_rollout.manager.types import PromptGroup


@dataclass(slots=True)
class ReadyGroups:
    """Queues by birth version; within one, in the order in which the groups became ready."""

    by_birth: dict[int, deque[PromptGroup]] = field(default_factory=dict)
    size: int = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[PromptGroup]:
        """Oldest birth first."""
        for birth in sorted(self.by_birth):
            yield from self.by_birth[birth]

    def add(self, group: PromptGroup) -> None:
        """Append ``group``, which has become ready."""
        assert group.birth is not None
        self.by_birth.setdefault(group.birth, deque()).append(group)
        self.size += 1

    def remove(self, group: PromptGroup) -> None:
        """Take out ``group``; in constant time if it is the first of its queue."""
        assert group.birth is not None
        groups = self.by_birth[group.birth]
        groups.remove(group)
        if not groups:
            del self.by_birth[group.birth]
        self.size -= 1
