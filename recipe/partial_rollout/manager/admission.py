"""How many new prompts may start: the three modes of a round.

By Little's law mean staleness follows from the number of groups in flight, so admission sets the staleness. ``window``
and ``april`` fill at the start of a round; ``ssim`` refills throughout.
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
    """What the manager holds when admission is asked."""

    groups: int
    """``pacing_load``: unfinished, ready, or in the batch that the present version trains"""
    unfinished_groups: int
    unfinished_samples: int
    kept: int = 0
    """groups admitted over the whole run, less the filtered ones"""
    to_replace: int = 0
    """groups filtered in this round that nothing has replaced yet"""


def pacing_load(kept: int, in_flight: int, batch_groups: int, version: int) -> int:
    """Groups that admission counts: each version trains N of those kept, and its batch counts until the next version.

    At the start of a colocated round all versions before it have their batches, so these are the groups in flight. In
    separate placement prompts start while the trainer holds a batch. Its groups still count: whoever starts in their place
    is as old as the next version's, and would be trained too late::

        N = 2, max_staleness 1: at most 4. Version 5 begins with 14 - 2 * 5 = 4 in flight.
        Its batch is taken: 2 are in flight, and 4 count. Two more would be born under version 5, too, and one version
        must then train 4 groups to keep the bound.

    >>> pacing_load(kept=14, in_flight=4, batch_groups=2, version=5), pacing_load(14, 2, 2, 5), pacing_load(14, 2, 2, 6)
    (4, 4, 2)

    Args:
        kept: groups admitted over the whole run, less the filtered ones.
        in_flight: groups unfinished or ready; the count is never below it.
        batch_groups: N.
    """
    return max(in_flight, kept - batch_groups * version)


@dataclass(frozen=True, slots=True)
class Admission:
    """Decides whether one more prompt may be admitted.

    Mode ``window``, 4 groups trained a step and an overlap of 0.5::

        start of a round    4 * (1 + 0.5) = 6 groups, unfinished or ready
        in the round        none, except to replace filtered groups
        at any time         at most (1 + max_staleness) * 4 = 12

    >>> window = Admission(Mode.WINDOW, 4, 8, 0.5, 8, 32, max_staleness=2)
    >>> five, six = (Load(groups, unfinished_groups=3, unfinished_samples=20) for groups in (5, 6))
    >>> window.allows(five, round_start=True), window.allows(six, round_start=True)
    (True, False)
    >>> window.allows(five, round_start=False)
    False

    Mode ``ssim`` counts samples, and refills throughout the round: 20 + 8 fit into 32.

    >>> ssim = Admission(Mode.SSIM, 4, 8, 0.5, 8, in_flight_samples=32, max_staleness=2)
    >>> ssim.allows(five, round_start=False)
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
    train_groups: int | None = None
    """groups that the whole training trains; with dynamic sampling no more are kept. None: as many as are offered"""

    @classmethod
    def of(cls, settings: PartialRolloutConfig) -> Admission:
        """The rule that ``settings`` describe."""
        return cls(
            mode=settings.mode,
            batch_groups=settings.batch_groups,
            samples_per_group=settings.samples_per_group,
            overlap=settings.overlap,
            over_sampling_batch_size=settings.over_sampling_batch_size,
            in_flight_samples=settings.in_flight_samples,
            max_staleness=settings.max_staleness,
        )

    @property
    def window(self) -> int:
        # A sum of notches can fall short of a whole number by a rounding error.
        return math.floor((1 + self.overlap) * self.batch_groups + 1e-6)

    @property
    def ceiling(self) -> int:
        """Most groups, unfinished or ready, that can all be trained before they are older than ``max_staleness``."""
        return (1 + self.max_staleness) * self.batch_groups

    def allows(self, load: Load, *, round_start: bool) -> bool:
        """Whether one more group may start under ``load``, at the start of a round or during it."""
        if load.groups >= self.ceiling or (self.train_groups is not None and load.kept >= self.train_groups):
            return False
        if self.mode is Mode.SSIM:
            return load.unfinished_samples + self.samples_per_group <= self.in_flight_samples or (
                load.groups < self.batch_groups
            )
        # ssim's budget of samples already refills the place of a filtered group.
        if load.to_replace:
            return True
        if not round_start:
            return False
        if self.mode is Mode.APRIL:
            return load.unfinished_groups < self.over_sampling_batch_size
        return load.groups < self.window

    def most_per_round(self) -> int:
        """Upper bound of the prompts that one round can admit."""
        return {
            Mode.WINDOW: self.window,
            Mode.APRIL: self.over_sampling_batch_size,
            Mode.SSIM: self.ceiling,
        }[self.mode]
