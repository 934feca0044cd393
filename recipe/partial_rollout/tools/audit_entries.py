"""What the audit keeps of a ledger's lines: the prompts as numbers, and what is wrong with a trained group by itself."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from recipe.partial_rollout.records.ledger import RunSizes, Trained
from recipe.partial_rollout.records.trained_group import TrainedGroup
from recipe.partial_rollout.tools.reading.lineage import Lineage
from recipe.partial_rollout.tools.reading.lines import RunRecordError

_PARTS = ("tokens", "log-probs", "versions", "mask entries")
POSITIONS = 1 << 32
"""A prompt is one number, ``epoch * POSITIONS + position``; they sort as the data does."""


def _key(uid: str) -> int:
    epoch, _, position = uid.partition("/")
    if not (epoch.isdecimal() and position.isdecimal() and int(position) < POSITIONS):
        raise RunRecordError(f"prompt {uid!r:.60} should be epoch/position")
    return int(epoch) * POSITIONS + int(position)


def uid_of(key: int) -> str:
    """The prompt's ``epoch/position``."""
    return f"{key // POSITIONS}/{key % POSITIONS}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the ledger, in little memory: 8 bytes a prompt."""

    step: int
    prompts: array[int]
    at: int = 0
    """byte at which the line begins; with the three that follow, of a trained step only"""
    masked: int = 0
    """samples"""
    staleness: int = 0
    """the largest"""
    faults: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: int, uids: Iterable[str]) -> Entry:
        """The prompts admitted or filtered in ``step``."""
        return cls(step, array("q", map(_key, uids)))

    @classmethod
    def of_trained(cls, event: Trained, at: int, sizes: RunSizes) -> Entry:
        """A trained step, whose line begins at byte ``at``, judged by the ``sizes`` in force."""
        return cls(
            event.step,
            array("q", (_key(group.uid) for group in event.groups)),
            at,
            masked=sum(sum(group.masked) for group in event.groups),
            staleness=max((age for group in event.groups for age in group.staleness), default=0),
            faults=tuple(line for group in event.groups for line in _faults_of(group, event.step, sizes)),
        )


@dataclass(slots=True)
class Entries:
    """The entries of one kind; those that resumes have undone do not count."""

    lines: Lineage[Entry] = field(default_factory=Lineage)
    standing: list[Entry] = field(default_factory=list)
    """filled in by ``settle``, with the two that follow"""
    all: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[entry] prompts in the order of the lines"""
    once: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[prompt] sorted, each once"""

    def settle(self) -> None:
        """All lines are read."""
        self.standing = list(self.lines.standing())
        self.all = np.concatenate([np.zeros(0, np.int64), *(np.array(entry.prompts) for entry in self.standing)])
        self.once = np.unique(self.all)

    def __iter__(self) -> Iterator[Entry]:
        """The entries that count."""
        return iter(self.standing)

    def repeated(self) -> np.ndarray:
        """[prompt] sorted: those of more than one entry."""
        prompts, times = np.unique(self.all, return_counts=True)
        return prompts[times > 1]

    def steps_of(self, prompts: np.ndarray) -> dict[int, list[int]]:
        """For each of a few ``prompts`` its steps."""
        steps: dict[int, list[int]] = {int(prompt): [] for prompt in prompts}
        for entry in self if steps else ():
            for prompt in entry.prompts:
                if prompt in steps:
                    steps[prompt].append(entry.step)
        return steps


def _faults_of(group: TrainedGroup, step: int, sizes: RunSizes) -> Iterator[str]:
    """What is wrong with a group that ``step`` trained under ``sizes``, a line each."""
    for index, staleness in enumerate(group.staleness):
        if staleness > sizes.max_staleness:
            yield (
                f"sample {group.uid}#{index} was trained in step {step} with staleness {staleness}: "
                f"at most {sizes.max_staleness}"
            )
    for index, lengths in enumerate(group.parts):
        if len(set(lengths)) != 1:
            parts = ", ".join(f"{count} {part}" for count, part in zip(lengths, _PARTS, strict=True))
            yield f"sample {group.uid}#{index} of step {step} has {parts}: must be equal"
    if len(group.parts) != sizes.samples_per_group:
        yield f"prompt {group.uid} was trained in step {step} with {len(group.parts)} samples of {sizes.samples_per_group}"
