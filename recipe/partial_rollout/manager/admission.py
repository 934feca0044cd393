"""Bounds staleness without dropping anything: how many new prompts may start, and when a batch is complete.

By Little's law mean staleness follows from the number of groups in flight, so admission sets the staleness. Modes
``window`` and ``april`` admit prompts when a version begins; ``ssim`` admits them at any time.

**The bound.** Each version trains one batch of the N oldest ready groups. Let K be ``max_staleness``, and a group's birth
the version under which its first sample started. Then every group is trained by version birth + K, if

1. *admission*: at any time at most (1 + K) N groups are unfinished, ready, or in the batch of the present version
   (``pacing_load``);
2. *completion*: version v takes its batch only when the groups that remain can be trained in time
   (``rest_can_be_trained``): for each j >= 0, at most j N of the remaining born groups have birth + K <= v + j. Until
   then the trainer waits; nothing is dropped.

A batch always completes. Once every born group is finished, version v takes the N oldest. For every w <= v, at most
(w + K - v + 1) N groups with birth <= w were left before that batch (w < v: rule 2 at v - 1; w = v: rule 1). The N oldest
go, so at most (w + K - v) N stay, which is rule 2::

    N = 2, K = 1: rule 1 allows 4 groups. Version 5 begins with two groups of birth 4 and two of birth 5.
    Both of birth 5 are ready. A batch of them would leave two of birth 4, which version 5 itself must train
    (j = 0): 2 > 0 * 2, so version 5 waits.
    One of birth 4 and one of birth 5 are ready. The other one of birth 4 would be left: 1 > 0 * 2, it waits.
    Both of birth 4 are ready. Left are two of birth 5, to be trained by version 6 (j = 1): 2 <= 1 * 2, it takes them.

    >>> [rest_can_be_trained({4: 2, 5: 2}, batch, version=5, max_staleness=1) for batch in ([5, 5], [4, 5], [4, 4])]
    [False, False, True]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipe.partial_rollout.config.settings import Mode, PartialRolloutConfig, whole
from recipe.partial_rollout.manager.groups import Groups


def rest_can_be_trained(
    births: Mapping[int | None, int], batch: Sequence[int | None], version: int, max_staleness: int
) -> bool:
    """Whether all groups that remain can be trained within ``max_staleness`` if ``version`` takes ``batch``.

    Args:
        births: number of groups in flight by birth, those of the batch included; None: not born yet.
        batch: births of the N groups of the batch.
    """
    left = Counter(births)
    left.subtract(batch)
    due = 0
    # WAITING groups have no birth. They start at this version or later, so admission bounds them.
    for birth in sorted(birth for birth in left if birth is not None):
        due += left[birth]
        # Below 0 only if a run was resumed with a smaller ``max_staleness``, which the preflight refuses where the
        # checkpoint names the old one: such groups must be in this batch.
        if due > max(0, birth + max_staleness - version) * len(batch):
            return False
    return True


def pacing_load(kept: int, in_flight: int, batch_groups: int, version: int) -> int:
    """Return the number of groups that admission counts: kept - N * version, or ``in_flight`` if that is more.

    Every version trains N of the kept groups. The batch of the present version counts until the next version begins,
    because prompts may start while the trainer has that batch. A prompt that starts in its place would share its birth
    with groups of the next batch, and break the bound::

        N = 2, K = 1: at most 4 may count. Version 5 begins with 14 - 2 * 5 = 4 groups in flight, two of them born at 5.
        Its batch is taken: 2 groups are in flight, and 4 still count, so no prompt starts. With two more, four groups
        would be born at 5, and version 6 alone would have to train all four.

    >>> pacing_load(kept=14, in_flight=4, batch_groups=2, version=5), pacing_load(14, 2, 2, 5), pacing_load(14, 2, 2, 6)
    (4, 4, 2)

    Args:
        kept: groups admitted over the whole run, less the filtered ones.
        in_flight: groups unfinished or ready.
        batch_groups: N.
    """
    return max(in_flight, kept - batch_groups * version)


@dataclass(frozen=True, slots=True)
class Admission:
    """Decides whether one more prompt may be admitted.

    Mode ``window``, 4 groups trained a step and an overlap of 0.5::

        a version begins    4 * (1 + 0.5) = 6 groups, unfinished or ready
        later               none, except to replace filtered groups
        at any time         at most (1 + max_staleness) * 4 = 12

    >>> from recipe.partial_rollout.config.settings import PartialRolloutConfig
    >>> from recipe.partial_rollout.manager.types import Prompt
    >>> sizes = {"batch_groups": 4, "samples_per_group": 8, "overlap": 0.5, "max_staleness": 2}
    >>> window, groups, admitted = Admission(PartialRolloutConfig(**sizes)), Groups(), 0
    >>> while window.allows(groups, 8 * admitted, version=0, version_begins=True):
    ...     _, admitted = groups.enter(Prompt(f"0/{admitted}", {}), samples=8), admitted + 1
    >>> admitted, window.allows(groups, 20, version=0, version_begins=False)
    (6, False)

    Mode ``ssim`` counts samples instead, and admits at any time. With 20 unfinished samples one more group of 8 fits
    into a batch of 4 * 8 samples:

    >>> Admission(PartialRolloutConfig(mode=Mode.SSIM, **sizes)).allows(groups, 20, version=0, version_begins=False)
    True
    """

    settings: PartialRolloutConfig
    train_groups: int | None = None
    """limit on the groups admitted over the whole run, less the filtered ones: as many as the whole training trains;
    None: no limit. The driver sets it for dynamic sampling with ``drain``"""

    @property
    def window(self) -> int:
        """Number of groups up to which prompts are admitted when a version begins, (1 + overlap) N.

        Mode ``window`` counts groups that are unfinished or ready, ``april`` only unfinished ones. With ``april`` and
        an overlap below 0 it is the smallest multiple of (1 + overlap) N that is at least N.

        >>> from recipe.partial_rollout.config.settings import PartialRolloutConfig
        >>> sizes = {"mode": Mode.APRIL, "batch_groups": 8, "samples_per_group": 1}
        >>> [Admission(PartialRolloutConfig(overlap=overlap, **sizes)).window for overlap in (0.5, -0.25, -0.5)]
        [12, 12, 8]
        """
        batch = self.settings.batch_groups
        size = whole((1 + self.settings.overlap) * batch)
        # Fewer than N at a time (april): as many portions as a batch needs.
        return size * math.ceil(batch / size) if size < batch else size

    @property
    def ceiling(self) -> int:
        """Limit on ``pacing_load``: so many groups can be trained within ``max_staleness`` versions."""
        return (1 + self.settings.max_staleness) * self.settings.batch_groups

    def allows(
        self, groups: Groups, unfinished_samples: int, version: int, *, version_begins: bool, to_replace: int = 0
    ) -> bool:
        """Whether one more group may be admitted under ``version``.

        Args:
            unfinished_samples: samples that have not finished; only mode ``ssim`` reads it.
            version_begins: whether the version begins now. Later, modes ``window`` and ``april`` only replace filtered
                groups.
            to_replace: groups filtered since the version began that nothing has replaced yet.
        """
        settings = self.settings
        counted = pacing_load(groups.kept, groups.in_flight, settings.batch_groups, version)
        if counted >= self.ceiling or (self.train_groups is not None and groups.kept >= self.train_groups):
            return False
        if settings.mode is Mode.SSIM:
            fits = unfinished_samples + settings.samples_per_group <= settings.batch_samples
            return fits or counted < settings.batch_groups
        # The budget of samples of mode ssim already refills the place of a filtered group.
        if to_replace:
            return True
        in_window = groups.waiting_or_active if settings.mode is Mode.APRIL else counted
        return version_begins and in_window < self.window

    def most_per_version(self) -> int:
        """Return an upper bound of the prompts that one version can admit, besides replacements of filtered groups."""
        return self.ceiling if self.settings.mode is Mode.SSIM else self.window
