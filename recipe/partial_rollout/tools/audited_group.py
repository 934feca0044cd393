"""A trained group before the audit: in time, whole, and with all its samples?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from recipe.partial_rollout.records.trained_group import TrainedGroup

_PARTS = ("tokens", "log-probs", "versions", "mask entries")


@dataclass(frozen=True, slots=True)
class AuditedGroup:
    """A trained group that no resume has undone."""

    step: int
    version: int
    max_staleness: int
    """in force when it was trained"""
    samples_per_group: int
    group: TrainedGroup

    def violations(self) -> Iterator[str]:
        """One line each."""
        group = self.group
        for index, staleness in enumerate(group.staleness):
            if staleness > self.max_staleness:
                yield (
                    f"sample {group.uid}#{index} was trained in step {self.step} with staleness {staleness}: "
                    f"at most {self.max_staleness}"
                )
        for index, lengths in enumerate(group.parts):
            if len(set(lengths)) != 1:
                parts = ", ".join(f"{count} {part}" for count, part in zip(lengths, _PARTS, strict=True))
                yield f"sample {group.uid}#{index} of step {self.step} has {parts}: must be equal"
        if len(group.parts) != self.samples_per_group:
            yield (
                f"prompt {group.uid} was trained in step {self.step} with {len(group.parts)} samples of "
                f"{self.samples_per_group}"
            )
