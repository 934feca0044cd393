"""What ``PromptsManager`` knows and a checkpoint keeps; nothing else in the recipe writes it.

Workers, their slots and the claim queue are not here: after a crash nobody owns anything.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from recipe.partial_rollout.manager.length_ledger import LengthLedger
from recipe.partial_rollout.manager.ready_groups import ReadyGroups
from recipe.partial_rollout.manager.types import FilteredGroup, Prompt, PromptGroup, Sample


@dataclass(slots=True)
class Counters:
    """Totals since the start of the run; they only grow."""

    admitted_groups: int = 0
    trained_groups: int = 0
    trained_tokens: int = 0
    interrupted: int = 0
    resumed: int = 0
    failed: int = 0
    """errors of agent loops"""
    retried: int = 0
    """of these, answered by a retry"""
    masked: int = 0
    """samples that failed for good"""
    filtered_groups: int = 0
    """consumed without being trained: their samples score alike"""
    filtered_tokens: int = 0
    spared_groups: int = 0
    """trained although their samples score alike: past the limit of a round, or for want of data"""


@dataclass(slots=True)
class ManagerState:
    """All prompts between the data source and the trainer."""

    reserve: deque[Prompt] = field(default_factory=deque)
    """offered and not admitted, in training order"""
    last_offered: str | None = None
    """uid; prompts come in order, so this tells every later one from one that was offered already"""
    source_open: bool = True
    version: int = 0
    counters: Counters = field(default_factory=Counters)
    lengths: LengthLedger = field(default_factory=LengthLedger)
    groups: dict[str, PromptGroup] = field(default_factory=dict)
    """in flight, by uid: unfinished or ready; in dispatch order"""
    ready: ReadyGroups = field(default_factory=ReadyGroups)
    taken: dict[str, PromptGroup] = field(default_factory=dict)
    """with the trainer, by uid"""
    by_order: dict[int, PromptGroup] = field(default_factory=dict)
    """``groups`` and ``taken``, by dispatch order"""
    samples: dict[str, Sample] = field(default_factory=dict)
    """unfinished, by id"""
    unfinished: Counter[int | None] = field(default_factory=Counter)
    """unfinished groups by birth version; None: nothing of them has started"""
    admitted: list[str] = field(default_factory=list)
    """uids admitted since the last batch was taken"""
    filtered: list[FilteredGroup] = field(default_factory=list)
    """those that the ledger does not know yet"""
    paced: int = 0
    """prompts that admission held back at the start of the last round"""

    def enter(self, group: PromptGroup) -> None:
        """Index ``group``, new or restored, with its samples."""
        self.groups[group.uid] = self.by_order[group.order] = group
        if group.unfinished:
            self.unfinished[group.birth] += 1
            self.samples |= {sample.id: sample for sample in group.samples if sample.output is None}
        else:
            self.ready.add(group)

    @property
    def unfinished_groups(self) -> int:
        return len(self.groups) - len(self.ready)

    @property
    def cached_tokens(self) -> int:
        """Response tokens of every sample in flight or with the trainer."""
        return sum(sample.length for group in self.by_order.values() for sample in group.samples)

    @property
    def carried_groups(self) -> int:
        """Groups in flight that have started."""
        return len(self.groups) - self.unfinished[None]

    @property
    def lost_groups(self) -> int:
        """Groups admitted that are neither trained, nor filtered, nor with the trainer, nor in flight: always 0."""
        consumed = self.counters.trained_groups + self.counters.filtered_groups
        return self.counters.admitted_groups - consumed - len(self.taken) - len(self.groups)
