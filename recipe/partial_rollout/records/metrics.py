"""Metrics that dashboard, report and forecast share; all three compute them here.

The other metrics of a step are named and computed in ``rollout/recorder.py``, ``manager/prompts_manager.py``,
``training/loss.py`` and ``training/agent_loop_manager.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from recipe.partial_rollout.records.run_log import RolloutPhase


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of a metric over samples or rounds."""

    mean: float
    p95: float
    max: float


def spread(values: Sequence[float] | np.ndarray) -> Spread | None:
    """Return mean, 95th percentile and maximum of ``values``; None if ``values`` is empty."""
    if not len(values):
        return None
    # No interpolation, as suits counts (versions, segments): the 95th percentile is one of the values.
    p95 = np.percentile(values, 95, method="inverted_cdf")
    return Spread(float(np.mean(values)), float(p95), float(np.max(values)))


def length_sigmas(groups: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return two standard deviations of response lengths, in tokens: of all samples, and within a group.

    The second is the root mean square over the groups. ``groups`` has the lengths of each group's samples.

    >>> length_sigmas([[1, 3], [9, 11]])
    (4.123105625617661, 1.0)
    """
    within = np.mean([np.var(lengths) for lengths in groups])
    return float(np.std(np.concatenate(groups))), float(np.sqrt(within))


@dataclass(frozen=True, slots=True)
class RunningCurve:
    """Number of running engine calls: ``running[:, i]`` from ``times[i]`` to ``times[i + 1]``, and 0 at the end."""

    times: np.ndarray
    """float [point], unix seconds, ascending; the first and last are the phase's start and end"""
    running: np.ndarray
    """int [row, point]; a row for each replica, or one row for all"""

    def slot_seconds(self, full: int) -> float:
        """Return the integral over time (s) of the number of running calls: the sum over the rows, cut at ``full``."""
        total = np.minimum(self.running.sum(axis=0), full)
        return float(np.sum(total[:-1] * np.diff(self.times)))


def running_curve(phase: RolloutPhase, replicas: int | None = None) -> RunningCurve:
    """Return the curve of the phase's calls, each from ``busy_from`` to ``end``, cut at the phase's start and end.

    Args:
        replicas: number of rows, one a replica; None: all calls in one row.
    """
    calls = len(phase.calls)
    starts, ends = (np.clip(phase.column(side), phase.start, phase.end) for side in ("busy_from", "end"))
    owners = np.zeros(calls, dtype=int) if replicas is None else phase.column("replica").astype(int)
    times, where = np.unique(np.concatenate([[phase.start, phase.end], starts, ends]), return_inverse=True)
    changes = np.zeros((replicas or 1, len(times)), dtype=int)
    # ``changes[...] += 1`` would count calls that begin together as one.
    np.add.at(changes, (owners, where[2 : 2 + calls]), 1)
    np.add.at(changes, (owners, where[2 + calls :]), -1)
    return RunningCurve(times, np.cumsum(changes, axis=1))


def bubble_fraction(phases: Sequence[RolloutPhase], full: int) -> float | None:
    """Return the mean share (0 to 1) of ``full`` slots that were empty in ``phases``; None if they took no time."""
    seconds = sum(phase.seconds for phase in phases)
    if seconds <= 0:
        return None
    return 1 - sum(running_curve(phase).slot_seconds(full) for phase in phases) / (full * seconds)


def bubble_of_ended(phase: RolloutPhase, full: int) -> float | None:
    """Return the bubble of a phase in which engine calls are still running when it ends; None if it took no time.

    The log has a call only once it has ended, so each call counts whole in the phase in which it ends. The share, 0 to
    1, is therefore right as a mean over many phases, not for a single one.
    """
    if phase.seconds <= 0:
        return None
    busy = sum(call.end - call.busy_from for call in phase.calls)
    return max(0.0, 1 - busy / (full * phase.seconds))


SECTION = "0_overview"
"""prefix of the keys of these metrics, before the slash"""

HELD_OUT = re.compile(r"val-core/.*/mean@\d+")
"""verl's mean validation reward (accuracy, if the reward function gives one) of a data source"""
KL = "rollout_corr/k3_kl"
"""verl's metric: divergence of the policy before the update from the behaviour policy, by the k3 estimator (nats a token).
Unlike the mean log-ratio, ``rollout_corr/kl``, it is never negative, and has less noise"""

_COPIES = {
    "reward": "critic/score/mean",
    "k3_kl": KL,
    "step_s": "timing_s/step",
    "rollout_s": "timing_s/gen",
    "bubble": "partial_rollout/rollout/bubble_fraction",
    "tokens_per_s": "partial_rollout/rollout/tokens_per_s",
    "staleness_mean": "partial_rollout/staleness/mean",
    "staleness_max": "partial_rollout/staleness/max",
    "off_policy_share": "partial_rollout/off_policy_token_fraction",
    "length_bias": "partial_rollout/length/bias",
}
"""name of a metric in the overview to the key of the step's metric that it copies"""

_SYNCHRONOUS = {"staleness_mean": 0.0, "staleness_max": 0.0, "off_policy_share": 0.0, "length_bias": 1.0}
"""values of these metrics under noPR, where a batch is dispatched, decoded and trained under one version"""

METRICS = ("held_out_reward", *_COPIES)
"""names of all metrics in the overview"""


def held_out_rewards(steps: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the mean validation rewards in ``steps``, in order: one for each data source of each validation.

    Args:
        steps: verl's metrics of each step; steps without a validation have no reward.
    """
    return [float(value) for step in steps for key, value in step.items() if HELD_OUT.fullmatch(key)]


def overview(data: Mapping[str, Any], *, partial: bool) -> dict[str, float]:
    """Return the overview's metrics of a step by full key, in the order in which a dashboard shows them.

    A metric that ``data`` does not give is left out. The held-out reward is the mean over the data sources.

    Args:
        data: the step's metrics, by verl's keys; a validation before the first step has few of them.
        partial: False under noPR: staleness, off-policy share and length bias are then constants.

    >>> overview({"val-core/gsm8k/acc/mean@4": 0.5, "val-core/math/acc/mean@4": 0.7}, partial=True)
    {'0_overview/held_out_reward': 0.6}
    >>> list(overview({"training/global_step": 1, "timing_s/gen": 3.0}, partial=False).items())[:2]
    [('0_overview/rollout_s', 3.0), ('0_overview/staleness_mean', 0.0)]
    """
    rewards = held_out_rewards([data])
    found = {"held_out_reward": float(np.mean(rewards))} if rewards else {}
    found |= {metric: float(data[source]) for metric, source in _COPIES.items() if source in data}
    if not partial and "training/global_step" in data:
        found |= _SYNCHRONOUS
    return {f"{SECTION}/{metric}": value for metric, value in found.items()}
