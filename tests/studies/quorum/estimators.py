"""Advantages of samples whose siblings have not all ended, beside those of whole groups.

Everything here is one sample's: its baseline, and the standard deviation that GRPO divides by.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve
from tests.studies.quorum.groups import Responses
from tests.studies.quorum.rounds import Batch, Job, Share, play

ESTIMATORS = {
    "share": "samples of the same batch among themselves",
    "ended": "all that have ended, among themselves",
    "first": "the first q - 1 others that ended",
    "expected": "the whole group, unfinished ones at the mean reward of responses that long",
    "drawn": "the whole group, for each unfinished one a response of the record that was longer",
    "history": "the prompt's last visit",
}
ALGORITHMS = ("grpo", "grpo without std", "rloo", "reinforce_plus_plus_baseline")
_BATCHES, _FEWEST = 8, 8
"""batches of the record, and how many of its longest responses stand in where fewer were longer"""
Moments = list[tuple[float, float]]
"""reward and squared reward of each sibling that has not ended, or what is expected of them"""


class Record:
    """Rewards by length of what the last batches trained: the run's own record."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._batches: list[np.ndarray] = []

    def add(self, batch: Batch, rewards: np.ndarray) -> None:
        """Note a batch when it is taken."""
        found = np.concatenate([rewards[share.group.at, list(share.samples)] for share in batch.shares])
        self._batches = [*self._batches[1 - _BATCHES :], np.stack([batch.lengths, found], axis=1)]
        table = np.concatenate(self._batches)
        by_length = np.argsort(table[:, 0], kind="stable")
        self._lengths, self._rewards = table[by_length, 0], table[by_length, 1]

    def of_longer(self, tokens: int) -> np.ndarray:
        """Rewards of responses longer than ``tokens``."""
        at = int(np.searchsorted(self._lengths, tokens, side="right"))
        return self._rewards[min(at, max(0, len(self._rewards) - _FEWEST)) :]

    def stand_ins(self, share: Share) -> dict[str, Moments]:
        """What stands for the siblings that have not ended, by estimator."""
        longer = [self.of_longer(tokens) for tokens in share.made.values()]
        drawn = [float(self._rng.choice(rewards)) for rewards in longer]
        return {
            "expected": [(float(rewards.mean()), float((rewards**2).mean())) for rewards in longer],
            "drawn": [(reward, reward**2) for reward in drawn],
        }


def baseline(
    name: str, share: Share, i: int, quorum: int, rewards: np.ndarray, stand_ins: dict[str, Moments], *, own: bool
) -> tuple[float, float]:
    """Baseline of sample ``i``, and the standard deviation that GRPO divides by.

    Args:
        rewards: float [rows, n].
        own: whether a sample's own reward is part of its baseline, as in GRPO; without it, RLOO's.
    """
    group = rewards[share.group.at]
    if name == "history":
        visit = rewards[share.group.at - 1 if share.group.at % 2 else (share.group.at + 1) % len(rewards)]
        return float(visit.mean()), float(visit.std(ddof=1))
    ended = {"whole": range(len(group)), "share": share.samples}.get(name, share.ended)
    others = [j for j in ended if j != i]
    if name == "first":
        others = others[: quorum - 1]
    with_own = [(reward, reward**2) for reward in group[[i, *others]].tolist()] + stand_ins.get(name, [])
    if len(with_own) == 1:
        return float(group[i]), 1.0  # a lone sample has no baseline, and advantage 0
    first, second = np.array(with_own).mean(axis=0)
    std = float(np.sqrt(max(second - first**2, 0.0) * len(with_own) / (len(with_own) - 1)))
    return (first if own else (first * len(with_own) - group[i]) / (len(with_own) - 1)), std


@dataclass(slots=True)
class Samples:
    """Trained samples in columns, in the order of training."""

    seed: list[int] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    late: list[bool] = field(default_factory=list)
    figures: list[list[float]] = field(default_factory=list)
    """baseline and deviation of every estimator, with and without the own reward"""


CURVE = EngineCurve(5e-3, 3e-4)


def trained(groups: Responses, n: int, quorum: int, overlap: float, versions: int, seeds: int, drift: bool) -> Samples:
    """All samples of runs of ``versions`` batches of eight groups, with their baselines.

    Args:
        drift: the rows that are drawn move from the first half of ``groups`` to the second in the course of the run.
    """
    lengths, rewards = groups
    found = Samples()
    for seed in range(seeds):
        rng, record = np.random.default_rng(seed), Record(np.random.default_rng(1_000 + seed))
        half, total = len(lengths) // 2, 8 * versions

        ramp = (rng.random() < drawn / total for drawn in itertools.count())
        rows = (int(rng.integers(half)) + half * late if drift else int(rng.integers(len(lengths))) for late in ramp)
        batches = play(Job(8, n, CURVE), lengths, quorum, overlap, rows)
        for version, batch in zip(range(versions), batches, strict=False):
            record.add(batch, rewards)
            for share in batch.shares:
                stand_ins = record.stand_ins(share)
                for i in share.samples:
                    found.seed.append(seed)
                    found.version.append(version)
                    found.group.append(share.group.order)
                    found.at.append(share.group.at)
                    found.index.append(i)
                    found.late.append(share.begun)
                    names = ["whole", *ESTIMATORS]
                    found.figures.append(
                        [
                            figure
                            for name in names
                            for own in (True, False)
                            for figure in baseline(name, share, i, quorum, rewards, stand_ins, own=own)
                        ]
                    )
    return found
