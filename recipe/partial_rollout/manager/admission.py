"""Bounds staleness without dropping anything: how many new prompts may start, and when a batch is complete.

By Little's law mean staleness follows from the number of groups in flight, so admission sets the staleness. ``window``
and ``april`` fill when a version begins; ``ssim`` refills throughout.

**The bound.** Each version trains one batch of the N oldest ready groups. Let K be ``max_staleness``, and a group's birth
the version under which its first sample started. Then every group is trained by version birth + K, if

1. *admission*: at most (1 + K) N groups count at any time: those unfinished or ready, and those that the present version
   trains (``pacing_load``);
2. *completion*: version v takes its batch only when the groups that remain can be trained in time
   (``rest_can_be_trained``): of those born, for each j >= 0 at most j N have birth + K <= v + j. Until
   then the trainer waits; nothing is dropped.

A batch always completes. Once every born group is finished, version v takes the N oldest. For every w <= v, at most
(w + K - v + 1) N groups with birth <= w were left before that batch (w < v: rule 2 at v - 1; w = v: rule 1). The N oldest
go, so at most (w + K - v) N stay, which is rule 2::

    N = 2, K = 1: at most 4 count. Version 5 begins with two groups born at 4 and two admitted, born at 5.
    Ready: both of 5. Left would be two of birth 4, to be trained by 5: 2 > 0 * 2, so version 5 waits.
    Ready: one of 4 and one of 5. Left would be one of 4: 1 > 0 * 2, it waits. Ready: both of 4. It takes them, and
    leaves two of 5, to be trained by version 6: 2 <= 1 * 2.

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
        # Below 0 where a run was resumed with a smaller ``max_staleness``: such groups must be in this batch.
        if due > max(0, birth + max_staleness - version) * len(batch):
            return False
    return True


def pacing_load(kept: int, in_flight: int, batch_groups: int, version: int) -> int:
    """Groups that admission counts: each version trains N of those kept, and its batch counts until the next version.

    Prompts may start while the trainer holds the batch of the present version. A prompt that starts in place of that batch
    would share its birth with the groups of the next batch, and exceed the bound::

        N = 2, K = 1: at most 4. Version 5 begins with 14 - 2 * 5 = 4 in flight.
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

    Mode ``ssim`` counts samples, and refills throughout: 20 + 8 fit into 4 * 8.

    >>> Admission(PartialRolloutConfig(mode=Mode.SSIM, **sizes)).allows(groups, 20, version=0, version_begins=False)
    True
    """

    settings: PartialRolloutConfig
    train_groups: int | None = None
    """groups that the whole training trains; with dynamic sampling no more are kept. None: as many as are offered"""

    @property
    def window(self) -> int:
        """Groups in flight when a version begins: unfinished or ready (window), or unfinished (april); at least N.

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
        """Whether one more group may start under ``version``, when it begins or later.

        Args:
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
        """Upper bound of the prompts that one version can admit."""
        return self.ceiling if self.settings.mode is Mode.SSIM else self.window
