"""The number of steps of a training, and for how many of them prompts are admitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


def step_of(checkpoint: Path | None) -> int:
    """The step of ``global_step_K``; 0 from scratch.

    >>> step_of(Path("outputs/global_step_12"))
    12
    """
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("global_step_"))


@dataclass(frozen=True, slots=True)
class TrainingSteps:
    """The steps of a training.

    >>> steps = TrainingSteps(per_epoch=10, epochs=2, total=15, drains=True, filters=False)
    >>> steps.data, steps.last, steps.offered
    (20, 15, 15)
    >>> TrainingSteps(per_epoch=10, epochs=2, total=15, drains=False, filters=False).offered
    20
    """

    per_epoch: int
    epochs: int
    total: int
    """``total_training_steps``; may exceed what the data suffices for"""
    drains: bool
    """whether the last steps train what is in flight instead of admitting more"""
    filters: bool
    """whether dynamic sampling consumes more prompts than are trained"""

    @property
    def data(self) -> int:
        """Steps that the data suffices for."""
        return self.per_epoch * self.epochs

    @property
    def last(self) -> int:
        """The last step."""
        return min(self.total, self.data)

    @property
    def offered(self) -> int:
        """Steps for which prompts are admitted: those of the training, or all that the data suffices for.

        With dynamic sampling a step consumes more prompts than it trains, and the manager bounds what is trained.
        """
        return self.last if self.drains and not self.filters else self.data
