"""Rounds in which a group trains once a quorum of it has ended, with a seat for every sample: all decode in lockstep.

A second simulator beside ``tools plan``'s, which plays whole groups alone: admission and the bound are the manager's own
rules, counted in samples instead of groups. With the quorum at n both agree (``quorum.md`` has the figures).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from recipe.partial_rollout.manager.admission import rest_can_be_trained
from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and on which engines."""

    batch_groups: int
    n: int
    curve: EngineCurve
    replicas: int = 1
    prompt_tokens: int = 0
    keeps_kv: bool = False
    max_staleness: int = 8


@dataclass(slots=True, eq=False)
class Group:
    order: int
    at: int
    """row of the lengths"""
    birth: int
    left: np.ndarray
    """int [n], tokens that each sample has yet to decode"""
    aged: np.ndarray
    """int [n], sum over the tokens of each sample of the version that made it"""
    ended: list[int] = field(default_factory=list)
    """in the order of their ends"""
    trained: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Share:
    """The samples of a group that one batch trains."""

    group: Group
    samples: tuple[int, ...]
    ended: tuple[int, ...]
    """all that have ended, in that order"""
    made: dict[int, int]
    """tokens that each of the others has made"""
    begun: bool
    """whether an earlier batch trained a share of it"""


@dataclass(frozen=True, slots=True)
class Batch:
    seconds: float
    shares: list[Share]
    staleness: np.ndarray
    """int [samples]"""
    lengths: np.ndarray
    """int [samples]"""
    token_ages: int


def play(job: Job, lengths: np.ndarray, quorum: int, overlap: float, order: Iterator[int]) -> Iterator[Batch]:
    """Batches without end.

    Args:
        lengths: int [rows, n].
        quorum: samples of a group after whose end it is ready; n: whole groups.
        order: rows of the groups that are admitted.
    """
    size, n = job.batch_groups * job.n, job.n
    window = int((1 + overlap) * job.batch_groups + 1e-6)
    groups: list[Group] = []
    version = admitted = 0
    while True:
        carried = list(groups)
        while -(-sum(n - len(group.trained) for group in groups) // n) < window:
            at = next(order)
            groups.append(Group(admitted, at, version, lengths[at].copy(), np.zeros(n, int)))
            admitted += 1
        steps, batch = _round(groups, quorum, size, version, job.max_staleness)
        seconds = _seconds(job, groups, carried, lengths, steps)
        for group in groups:
            made = np.minimum(group.left, steps)
            ends = [i for i in np.argsort(group.left, kind="stable").tolist() if 0 < group.left[i] <= steps]
            group.aged += made * version
            group.left -= made
            group.ended += ends
        shares, ages = [], 0
        for group, samples in batch:
            made_so_far = lengths[group.at] - group.left
            others = {i: int(made_so_far[i]) for i in range(n) if group.left[i]}
            shares.append(Share(group, samples, tuple(group.ended), others, bool(group.trained)))
            group.trained.update(samples)
            chosen = list(samples)
            ages += int((version * lengths[group.at, chosen] - group.aged[chosen]).sum())
        groups = [group for group in groups if len(group.trained) < n]
        staleness = np.concatenate([np.full(len(s.samples), version - s.group.birth) for s in shares])
        trained = np.concatenate([lengths[s.group.at, list(s.samples)] for s in shares])
        yield Batch(seconds, shares, staleness, trained, ages)
        version += 1


def _round(
    groups: list[Group], quorum: int, size: int, version: int, max_staleness: int
) -> tuple[int, list[tuple[Group, tuple[int, ...]]]]:
    """Steps until the batch is complete, and the batch: the oldest ``size`` samples of groups that are ready."""
    births: Counter[int | None] = Counter()
    for group in groups:
        births[group.birth] += len(group.left) - len(group.trained)
    at, owners, indices = [], [], []
    for place, group in enumerate(groups):
        ready = np.sort(group.left)[quorum - 1]
        for i in range(len(group.left)):
            if i not in group.trained:
                at.append(max(ready, group.left[i]))
                owners.append(place)
                indices.append(i)
    moments, owner, index = np.array(at), np.array(owners), np.array(indices)
    for steps in sorted({int(moment) for moment in np.sort(moments)[size - 1 :]}):
        chosen = np.flatnonzero(moments <= steps)[:size]
        if rest_can_be_trained(births, [groups[place].birth for place in owner[chosen]], version, max_staleness):
            break
    batch: dict[int, list[int]] = {}
    for place, i in zip(owner[chosen].tolist(), index[chosen].tolist(), strict=True):
        batch.setdefault(place, []).append(i)
    return steps, [(groups[place], tuple(samples)) for place, samples in batch.items()]


def _seconds(job: Job, groups: list[Group], carried: list[Group], lengths: np.ndarray, steps: int) -> float:
    """Of the round: each replica has an even part of the samples at every step."""
    left = np.concatenate([group.left for group in groups])
    had = np.concatenate([lengths[group.at] - group.left for group in groups]) + job.prompt_tokens
    made = np.minimum(left, steps)
    fresh = np.concatenate([np.full(len(g.left), g not in carried or not job.keeps_kv) for g in groups])
    contexts = (had * made + made * (made - 1) / 2).sum()
    read = (had * (fresh & (left > 0))).sum()
    curve = job.curve
    shared = curve.sample_s * made.sum() + curve.context_s * contexts + curve.prefill_s * read
    return curve.step_s * steps + shared / job.replicas
