"""The samples of a simulation: their lengths, and the versions that make their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipe.partial_rollout.manager.types import FinishedOutput, Grant, Prompt, SampleOutput, TakenGroup
from recipe.partial_rollout.planner.lengths import LengthTrace
from recipe.partial_rollout.planner.replica_model import Decoding


@dataclass(slots=True)
class PlayedSample:
    length: int
    engine: Decoding
    first_version: int | None = None
    """version that decoded its first token"""
    made_before: int = 0
    """tokens made by versions before the present one"""
    ended_version: int | None = None
    token_versions: int = 0
    """sum over its tokens of the version that made each"""

    @property
    def made(self) -> int:
        return self.length - self.engine.left

    def note_made(self, version: int) -> int:
        """Note that ``version`` made what was made since the last version; returns how many tokens."""
        made = self.made - self.made_before
        if self.first_version is None and self.made:
            self.first_version = version
        self.token_versions += version * made
        return made


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """Figures of one simulated batch."""

    lengths: np.ndarray
    """int [trained groups, samples of a group], tokens"""
    staleness: np.ndarray
    """int [trained groups, samples of a group], versions since the first token of each"""
    on_policy_tokens: int
    """tokens that the version made from which the batch trains"""
    token_ages: int
    """sum over the tokens of the versions between each token's own and the one that trains it"""

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


class PlayedSamples:
    """Draws the lengths of prompts, and follows their samples until they are trained.

    Args:
        lengths: response lengths by group.
        samples_per_group: ``rollout.n``.
        seed: for drawing groups from ``lengths``; None: they come in order, over and over.
        groups: number of groups in the data; None: endless.

    Raises:
        ValueError: ``lengths`` has groups of another size.
    """

    def __init__(self, lengths: LengthTrace, samples_per_group: int, *, seed: int | None, groups: int | None) -> None:
        if lengths.samples_per_group != samples_per_group:
            raise ValueError(f"lengths are of groups of {lengths.samples_per_group}, rollout.n is {samples_per_group}")
        self._prompt_tokens = lengths.prompt_tokens
        self._lengths = lengths.replay() if seed is None else lengths.draw(seed)
        self._groups = groups
        self._left: dict[str, list[int]] = {}
        """for each group offered and not trained: lengths of its samples that have not started, last first"""
        self.live: dict[str, PlayedSample] = {}
        """samples that started and are not trained, by id"""
        self.dispatched: list[np.ndarray] = []
        """lengths of the groups offered, in order; int [samples of a group] each"""

    @property
    def all_offered(self) -> bool:
        return len(self.dispatched) == self._groups

    @property
    def all_trained(self) -> bool:
        return self.all_offered and not self._left

    def prompts(self, wanted: int) -> list[Prompt]:
        """The next ``wanted`` prompts; fewer if the data runs out."""
        first = len(self.dispatched)
        count = wanted if self._groups is None else min(wanted, self._groups - first)
        prompts = [Prompt(f"0/{i}", 0, {}) for i in range(first, first + count)]
        for prompt in prompts:
            self.dispatched.append(next(self._lengths))
            self._left[prompt.uid] = self.dispatched[-1].tolist()[::-1]
        return prompts

    def start(self, grant: Grant) -> tuple[PlayedSample, bool]:
        """The sample of ``grant``, and whether it ran before."""
        known = self.live.get(grant.sample_id)
        if known is not None:
            return known, True
        length = self._left[grant.group_uid].pop()
        engine = Decoding(grant.sample_id, self._prompt_tokens, length, grant.order)
        self.live[grant.sample_id] = sample = PlayedSample(length, engine)
        return sample, False

    def note_made(self, sample_id: str, version: int) -> int:
        """See ``PlayedSample.note_made``."""
        return self.live[sample_id].note_made(version)

    def end(self, sample_id: str, version: int) -> SampleOutput:
        """Note that the sample ended under ``version``; returns an output whose arrays take no memory."""
        sample = self.live[sample_id]
        sample.ended_version = version
        sample.note_made(version)
        zeros = np.broadcast_to(np.int32(0), sample.length)
        return SampleOutput(zeros[:0], zeros, zeros, zeros, zeros, 1, None, {}, 2, {})

    def end_version(self, version: int) -> None:
        """Note what ``version`` made of the samples that run on."""
        for sample in self.live.values():
            if sample.ended_version is None:
                sample.note_made(version)

    def begin_version(self) -> None:
        """What is made from here on is made by the next version."""
        for sample in self.live.values():
            sample.made_before = sample.made

    def made_by_this_version(self) -> int:
        """Tokens of all samples since ``begin_version``."""
        return sum(sample.made - sample.made_before for sample in self.live.values())

    def train(self, groups: Sequence[TakenGroup[FinishedOutput]], version: int) -> TrainedBatch:
        """Train ``groups`` from ``version``, and forget them."""
        trained = [[self.live.pop(f"{group.uid}#{i}") for i in range(len(group.outputs))] for group in groups]
        for group in groups:
            del self._left[group.uid]
        return TrainedBatch(
            lengths=np.array([[sample.length for sample in group] for group in trained]),
            staleness=np.array([[version - (sample.first_version or 0) for sample in group] for group in trained]),
            on_policy_tokens=sum(
                sample.length - sample.made_before
                for group in trained
                for sample in group
                if sample.ended_version == version
            ),
            token_ages=sum(version * s.length - s.token_versions for group in trained for s in group),
        )
