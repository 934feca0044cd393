"""The time that the trainer takes for a batch, and the engines for its weights."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What new weights cost in separate placement."""

    stage_s: float
    """from the end of the update until all replicas have the weights at hand; they decode meanwhile"""
    hold_s: float
    """in which all engines stand still and load them"""


TRAINER_PRESETS = {
    "h20-qwen3-4b": TrainerRate(15.0, 0.65e-3),
    "h100-qwen3-4b": TrainerRate(15.0, 0.12e-3),
}
"""Assumptions for Qwen3-4B in bfloat16; none of the figures was measured."""

UPDATE_PRESET = WeightUpdate(stage_s=5.0, hold_s=1.0)
"""An assumption for a model of 4B parameters that is loaded from host memory (``TRAINER_PRESETS``)."""
