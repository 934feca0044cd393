"""A round whose batch the trainer has, while workers still report its unfinished samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipe.partial_rollout.manager.messages import Flushed, RolloutFailedError, RoundEnd, RoundStart
from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.records.engine_call import EngineCall


@dataclass(frozen=True, slots=True)
class PlayedRound:
    """What is known of a played round; moments are in unix seconds."""

    step: int
    start: RoundStart
    end: RoundEnd
    began: float
    opened_at: float
    """when engine calls were allowed"""
    quiet_at: float
    """when no engine ran any more"""
    groups: list[TakenGroup]
    flushing: list[Any]
    """Ray references, one a worker; resolved once it has reported everything"""
    flushed: Any
    """Ray reference to the manager's ``Flushed``"""

    def waits(self, flushed: Flushed, calls: Sequence[EngineCall]) -> dict[str, float]:
        """Seconds from opening to the first call, from the decision to quiet engines, and from then to the last report.

        The trainer updates during the last of these.
        """
        first_call = min((call.start for call in calls), default=self.opened_at)
        return {
            "resume_s": max(0.0, first_call - self.opened_at),
            "interrupt_s": self.quiet_at - self.end.decided_at,
            "collect_s": max(0.0, flushed.at - self.quiet_at),
        }


def check_batch(groups: Sequence[TakenGroup], size: int, max_masked_fraction: float) -> None:
    """Refuse a batch that cannot be trained.

    Raises:
        RolloutFailedError: it has fewer than ``size`` groups, or too many masked samples.
    """
    if len(groups) != size:
        raise RolloutFailedError(f"the data ran out with {len(groups)} groups ready; a batch needs {size}")
    outputs = [output for group in groups for output in group.outputs]
    masked = sum(output.masked for output in outputs)
    if masked > max_masked_fraction * len(outputs):
        error = next(output.extra_fields["sample_error"] for output in outputs if output.masked)
        raise RolloutFailedError(
            f"{masked} of the {len(outputs)} samples of a batch failed for good, more than "
            f"partial_rollout.failures.max_masked_fraction={max_masked_fraction:g}; one of them: {error}"
        )
