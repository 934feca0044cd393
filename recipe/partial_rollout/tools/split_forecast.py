"""Forecasts separate placement: how many of the devices train, how many decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.tools.planner.engine_curve import Cluster
from recipe.partial_rollout.tools.planner.rounds import SeparateTrainer, Simulation, WeightUpdate
from recipe.partial_rollout.tools.planner.samples import LengthTrace


@dataclass(frozen=True, slots=True)
class TrainerRate:
    """A batch takes ``fixed_s``, and ``token_s`` a trained token on one device; more devices share the tokens."""

    fixed_s: float
    """seconds that more devices do not shorten"""
    token_s: float
    """seconds of one device for a trained token: log-probs, forward, backward, update"""

    @classmethod
    def measured(cls, train_s: float, fixed_s: float, tokens: float, devices: int) -> TrainerRate:
        """The rate at which ``devices`` trained a batch of ``tokens`` in ``train_s``, of which ``fixed_s`` are fixed.

        >>> TrainerRate.measured(train_s=60.0, fixed_s=20.0, tokens=1000, devices=8).seconds(1000, devices=4)
        100.0
        """
        return cls(fixed_s, max(0.0, train_s - fixed_s) * devices / tokens)

    def seconds(self, tokens: float, devices: int) -> float:
        """Seconds of a batch of ``tokens`` on ``devices``."""
        return self.fixed_s + self.token_s * tokens / devices


TRAINER_PRESETS = {
    "h20-qwen3-4b": TrainerRate(15.0, 0.65e-3),
    "h100-qwen3-4b": TrainerRate(15.0, 0.12e-3),
}
"""Assumptions for Qwen3-4B in bfloat16; none of the figures was measured."""

UPDATE_PRESET = WeightUpdate(stage_s=5.0, hold_s=1.0)
"""An assumption for a model of 4B parameters that is loaded from host memory (``TRAINER_PRESETS``)."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a job, and how both sides use them."""

    replicas: int
    """engine replicas that all devices together would make"""
    per_replica: int
    trainer: TrainerRate
    update: WeightUpdate

    @property
    def count(self) -> int:
        return self.replicas * self.per_replica

    def trainers(self, engines: int) -> int:
        """Devices left to the trainer beside ``engines`` replicas."""
        return self.count - engines * self.per_replica


@dataclass(frozen=True, slots=True)
class SeparateForecast:
    """Figures of one split, over the steps after the warm-up unless a field says otherwise; seconds are means."""

    engines: int
    """replicas that decode"""
    trainers: int
    """devices that train"""
    step_s: float
    train_s: float
    """of a step, in which the trainer computes"""
    waiting_s: float
    """of a step, in which the trainer waits for its batch"""
    trained_tokens_per_s: float
    engine_idle: float
    """share of the engines' time without a sample"""
    engine_held: float
    """share of the engines' time in which they stand still for new weights"""
    staleness_mean: float
    """versions, over trained samples"""
    staleness_max: int
    """versions, over all steps"""
    token_age_mean: float
    """versions between a trained token's own and the one that trains it"""

    @property
    def trainer_idle(self) -> float:
        """Share of a step in which the trainer waits for its batch."""
        return self.waiting_s / self.step_s


def forecast_separate(
    admission: Admission,
    scheduling: Scheduling,
    cluster: Cluster,
    lengths: LengthTrace,
    devices: Devices,
    engines: int,
    *,
    warmup: int,
    steps: int = 24,
) -> SeparateForecast:
    """The forecast of ``steps`` steps after ``warmup`` ones (``forecast.warmup_rounds``).

    Args:
        cluster: one replica's speed and slots.
        engines: replicas that decode; all other devices train.
    """
    trainers = devices.trainers(engines)

    def train_s(tokens: int) -> float:
        return devices.trainer.seconds(tokens, trainers)

    split = replace(cluster, replicas=engines)
    simulation = Simulation(admission, scheduling, split, lengths, SeparateTrainer(train_s, devices.update))
    played = list(simulation.rounds(warmup + steps))
    steady = played[warmup:]
    seconds, tokens = sum(s.seconds for s in steady), sum(s.batch.tokens for s in steady)
    return SeparateForecast(
        engines=engines,
        trainers=trainers,
        step_s=seconds / len(steady),
        train_s=sum(train_s(s.batch.tokens) for s in steady) / len(steady),
        waiting_s=sum(s.waiting_s for s in steady) / len(steady),
        trained_tokens_per_s=tokens / seconds,
        engine_idle=sum(s.idle_s for s in steady) / seconds,
        engine_held=sum(s.held_s for s in steady) / seconds,
        staleness_mean=float(np.concatenate([s.batch.staleness.ravel() for s in steady]).mean()),
        staleness_max=max(int(s.batch.staleness.max()) for s in played),
        token_age_mean=sum(s.batch.token_ages for s in steady) / tokens,
    )


def balanced(devices: Devices, round_s: float, tokens: float) -> int:
    """Replicas with which both sides would take equally long, if rounds of ``round_s`` got longer as replicas get fewer.

    Args:
        round_s: seconds in which all replicas decode a batch.
        tokens: of a batch.
    """

    def longer_side(engines: int) -> float:
        decode_s = round_s * devices.replicas / engines
        return max(decode_s, devices.trainer.seconds(tokens, devices.trainers(engines)))

    return min(range(1, devices.replicas), key=longer_side)


def best_split(
    made: Callable[[int], SeparateForecast], start: int, most: int
) -> tuple[SeparateForecast, list[SeparateForecast]]:
    """The fastest forecast that no neighbour beats, and all that were made, by number of replicas.

    Speed has one peak: below it the trainer waits, above it the engines do. So the search climbs from ``start``.

    Args:
        made: the forecast with so many replicas.
        most: largest number of replicas.
    """
    seen: dict[int, SeparateForecast] = {}

    def speed(engines: int) -> float:
        if not 1 <= engines <= most:
            return 0.0
        if engines not in seen:
            seen[engines] = made(engines)
        return seen[engines].trained_tokens_per_s

    best = min(max(start, 1), most)
    while True:
        faster = max((best, best - 1, best + 1), key=speed)
        if faster == best:
            return seen[best], [seen[engines] for engines in sorted(seen)]
        best = faster
