"""The samples of a simulation: their lengths, of a run or drawn, and the versions of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Self

import numpy as np

from recipe.partial_rollout.manager.types import Grant, Prompt, SampleOutput, TakenGroup
from recipe.partial_rollout.tools.planner.replica_model import Decoding
from recipe.partial_rollout.tools.run_record import RunRecord

_MOST_WAITED = 0.05
"""seconds between turns, over those of engine calls, that a forecast may leave out"""


@dataclass(frozen=True, slots=True)
class LengthTrace:
    """Groups of response lengths; the lengths of a group stay together because they are correlated."""

    groups: np.ndarray
    """int [groups, samples of a group], tokens"""
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if self.groups.ndim != 2 or not self.groups.size or self.groups.min() < 1:
            raise ValueError("a length trace is a table of at least one group, its lengths at least 1 token")

    @classmethod
    def of_run(cls, run: RunRecord) -> Self:
        """Generated tokens of the trained samples of ``run``, in dispatch order; prompts as long as its first ones.

        Raises:
            ValueError: its samples waited for tools, which a simulation does not play.
        """
        calls = run.calls
        _, left, back = calls.between_turns()
        waited, ran = float((back - left).sum()), float((calls.column("end") - calls.column("busy_from")).sum())
        if waited > _MOST_WAITED * ran:
            raise ValueError(
                f"{run.directory}: samples waited {waited:,.0f} s between turns and decoded {ran:,.0f} s; the simulation "
                "plays no tools, so compare short runs instead"
            )
        groups = sorted(run.trained_groups, key=lambda group: group.order)
        first = next((round_.phase.calls for round_ in run.rounds if round_.phase.calls), ())
        # The first call of each sample; a trace that names none has single turns.
        prompts = {call.sample or at: call.context_tokens for at, call in reversed(list(enumerate(first)))}
        # What tools wrote is part of a response, and is not decoded.
        generated = [np.array(group.lengths) * (group.tokens / max(1, sum(group.lengths))) for group in groups]
        lengths = np.maximum(1, np.rint(generated).astype(int))
        return cls(lengths, round(float(np.median(list(prompts.values())))) if prompts else 0)

    @classmethod
    def lognormal(
        cls,
        *,
        median: float,
        mean: float,
        cap: int,
        samples_per_group: int,
        groups: int = 4096,
    ) -> Self:
        """Lognormal lengths cut off at ``cap``; within a group their logarithms have a correlation of .5.

        Raises:
            ValueError: the mean is not above the median: a lognormal distribution has a long right tail.
        """
        if not 0 < median < mean:
            raise ValueError(f"lognormal lengths need 0 < median < mean, not median {median:g} and mean {mean:g}")
        sigma = np.sqrt(2 * np.log(mean / median))
        rng = np.random.default_rng(0)
        shared = rng.standard_normal((groups, 1)) * np.sqrt(0.5)
        own = rng.standard_normal((groups, samples_per_group)) * np.sqrt(0.5)
        drawn = median * np.exp(sigma * (shared + own))
        return cls(np.clip(np.rint(drawn), 1, cap).astype(int))

    @property
    def samples_per_group(self) -> int:
        return self.groups.shape[1]

    @property
    def mean(self) -> float:
        return float(self.groups.mean())

    @property
    def mean_context(self) -> float:
        """Mean context of a sample over its decoding steps, in tokens, if all samples decode without a pause."""
        return self.prompt_tokens + float((self.groups.astype(float) ** 2).sum() / (2 * self.groups.sum()))

    def draw(self, seed: int) -> Iterator[int]:
        """Indices of groups drawn with replacement, for ever."""
        rng = np.random.default_rng(seed)
        while True:
            yield from rng.integers(len(self.groups), size=256).tolist()


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

    @property
    def made_now(self) -> int:
        """Tokens made by the present version."""
        return self.made - self.made_before

    def note_made(self, version: int) -> None:
        """Note that ``version`` made what was made since the last version."""
        if self.first_version is None and self.made:
            self.first_version = version
        self.token_versions += version * self.made_now


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
        self._lengths = lengths
        self._order = cycle(range(len(lengths.groups))) if seed is None else lengths.draw(seed)
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
        prompts = [Prompt(f"0/{i}", {}) for i in range(first, first + count)]
        for prompt in prompts:
            lengths = self._lengths.groups[next(self._order)]
            self.dispatched.append(lengths)
            self._left[prompt.uid] = lengths.tolist()[::-1]
        return prompts

    def start(self, grant: Grant) -> tuple[PlayedSample, bool]:
        """The sample of ``grant``, and whether it ran before."""
        known = self.live.get(grant.sample_id)
        if known is not None:
            return known, True
        length = self._left[grant.group_uid].pop()
        sample = PlayedSample(length, Decoding(grant.sample_id, self._lengths.prompt_tokens, length, grant.order))
        self.live[grant.sample_id] = sample
        return sample, False

    def end(self, sample_id: str, version: int) -> SampleOutput:
        """Note that the sample ended under ``version``; returns an output whose arrays take no memory."""
        sample = self.live[sample_id]
        sample.ended_version = version
        sample.note_made(version)
        zeros = np.broadcast_to(np.int32(0), sample.length)
        return SampleOutput(zeros[:0], zeros, zeros, zeros, zeros, 1, None, {}, 2, {})

    def end_version(self, version: int) -> None:
        """Note what ``version`` made of the samples that go on; what they make from here on is the next version's."""
        for sample in self.live.values():
            if sample.ended_version is None:
                sample.note_made(version)
                sample.made_before = sample.made

    def train(self, groups: Sequence[TakenGroup], version: int) -> TrainedBatch:
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
