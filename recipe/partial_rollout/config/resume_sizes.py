"""Sizes a run must match to resume from another run's checkpoints: checked before Ray starts, and again by the manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BATCH, GROUP, BOUND = "data.train_batch_size", "actor_rollout_ref.rollout.n", "partial_rollout.max_staleness"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A key whose value keeps a run from resuming."""

    key: str
    here: int
    allowed: str
    why: str = ""

    def allowed_by(self, checkpoint: str) -> str:
        """What the key must be; ``checkpoint`` is a clause such as ``as in DIRECTORY``."""
        return f"{self.allowed}, {checkpoint}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class ResumeSizes:
    """The sizes of one run.

    >>> ResumeSizes(8, 4, 2).mismatch(ResumeSizes(8, 4, 3)).allowed_by("as in global_step_3")
    'at least 3, as in global_step_3: groups in flight could not be trained in time'
    """

    batch_groups: int
    """``data.train_batch_size``"""
    samples_per_group: int
    """``actor_rollout_ref.rollout.n``"""
    max_staleness: int
    """versions"""

    def by_key(self) -> dict[str, int]:
        """The sizes under their keys in the config."""
        return {BATCH: self.batch_groups, GROUP: self.samples_per_group, BOUND: self.max_staleness}

    @classmethod
    def of_keys(cls, sizes: dict[str, Any]) -> ResumeSizes:
        """The sizes in a mapping that ``by_key`` made."""
        return cls(sizes[BATCH], sizes[GROUP], sizes[BOUND])

    def mismatch(self, saved: ResumeSizes) -> Mismatch | None:
        """Why a run of these sizes cannot resume from a checkpoint of sizes ``saved``; None if it can."""
        theirs = saved.by_key()
        for key, here in self.by_key().items():
            if key != BOUND and here != theirs[key]:
                return Mismatch(key, here, str(theirs[key]))
        if self.max_staleness < saved.max_staleness:
            # Groups that waited under a larger bound could be past this one before they can be trained.
            why = "groups in flight could not be trained in time"
            return Mismatch(BOUND, self.max_staleness, f"at least {saved.max_staleness}", why)
        return None
