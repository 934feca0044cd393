"""How many new prompts may start: the three modes of a round.

Little's law ties mean staleness to the groups in flight, so admission is where staleness is bought. ``window`` and
``april`` fill at the start of a round; ``ssim`` refills all through it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe.partial_rollout.config.choices import Mode

if TYPE_CHECKING:
    from recipe.partial_rollout.config.settings import PartialRolloutConfig


@dataclass(frozen=True, slots=True)
class Load:
    """What the manager holds."""

    groups: int
    """unfinished or ready"""
    unfinished_groups: int
    unfinished_samples: int
    kept: int = 0
    """groups admitted over the whole run, less the filtered ones"""
    to_replace: int = 0
    """groups filtered in this round that nothing has replaced yet"""


@dataclass(frozen=True, slots=True)
class Admission:
    """Decides whether one more prompt may be admitted.

    Mode ``window``, 4 groups trained a step and an overlap of 0.5::

        start of a round    4 * (1 + 0.5) = 6 groups, unfinished or ready
        in the round        none, but for those that replace filtered groups
        at any time         at most (1 + max_staleness) * 4 = 12

    >>> window = Admission(Mode.WINDOW, 4, 8, 0.5, 8, 32, max_staleness=2)
    >>> five, six = (Load(groups, unfinished_groups=3, unfinished_samples=20) for groups in (5, 6))
    >>> window.allows(five, round_start=True, version=0), window.allows(six, round_start=True, version=0)
    (True, False)
    >>> window.allows(five, round_start=False, version=0)
    False

    Mode ``ssim`` counts samples, and refills all through the round: 20 + 8 fit into 32.

    >>> ssim = Admission(Mode.SSIM, 4, 8, 0.5, 8, in_flight_samples=32, max_staleness=2)
    >>> ssim.allows(five, round_start=False, version=0)
    True
    """

    mode: Mode
    batch_groups: int
    """N: groups trained a step"""
    samples_per_group: int
    overlap: float
    """spare groups in flight as a share of N (window)"""
    over_sampling_batch_size: int
    """unfinished groups at the start of a round (april)"""
    in_flight_samples: int
    """budget of unfinished samples (ssim)"""
    max_staleness: int
    ramp_rounds: int = 0
    """first rounds over which the spare groups grow to their number (window, april)"""
    train_groups: int | None = None
    """groups that the training trains in all: with dynamic sampling, no more than that are kept; None: all it is offered"""

    @classmethod
    def of(cls, settings: PartialRolloutConfig) -> Admission:
        """The rule that ``settings`` ask for."""
        return cls(
            mode=settings.mode,
            batch_groups=settings.batch_groups,
            samples_per_group=settings.samples_per_group,
            overlap=settings.overlap,
            over_sampling_batch_size=settings.over_sampling_batch_size,
            in_flight_samples=settings.in_flight_samples,
            max_staleness=settings.max_staleness,
            ramp_rounds=settings.ramp_rounds,
        )

    @property
    def window(self) -> int:
        # A sum of notches falls short of the round number it means by the last bits.
        return math.floor((1 + self.overlap) * self.batch_groups + 1e-6)

    def _ramped(self, groups: int, version: int) -> int:
        """``groups`` at the start of a round, less the spare ones that round ``version`` does not have yet."""
        if version >= self.ramp_rounds:
            return groups
        return self.batch_groups + (groups - self.batch_groups) * (version + 1) // (self.ramp_rounds + 1)

    @property
    def ceiling(self) -> int:
        """Most groups, unfinished or ready, that can all be trained before they are older than ``max_staleness``."""
        return (1 + self.max_staleness) * self.batch_groups

    def allows(self, load: Load, *, round_start: bool, version: int) -> bool:
        """Whether one more group may start under ``load``, at the start of round ``version`` (from 0) or in the middle."""
        if load.groups >= self.ceiling or (self.train_groups is not None and load.kept >= self.train_groups):
            return False
        if self.mode is Mode.SSIM:
            return load.unfinished_samples + self.samples_per_group <= self.in_flight_samples or (
                load.groups < self.batch_groups
            )
        # ssim's budget of samples has the place of a filtered group refilled already.
        if load.to_replace:
            return True
        if not round_start:
            return False
        if self.mode is Mode.APRIL:
            return load.unfinished_groups < self._ramped(self.over_sampling_batch_size, version)
        return load.groups < self._ramped(self.window, version)

    def most_per_round(self) -> int:
        """Upper bound of the prompts that one round can admit."""
        return {
            Mode.WINDOW: self.window,
            Mode.APRIL: self.over_sampling_batch_size,
            Mode.SSIM: self.ceiling,
        }[self.mode]
