"""A batch of separate placement, from its taking to its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipe.partial_rollout.manager.messages import RoundStart, StepAccount
from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.records.rollout_phase import RolloutPhase
from recipe.partial_rollout.rollout.trained_round import TrainedRound


@dataclass(frozen=True, slots=True)
class StreamedBatch:
    """A batch that the trainer has; moments are in unix seconds."""

    step: int
    start: RoundStart
    """of its version"""
    since: float
    """when the batch before it was taken"""
    asked_at: float
    taken_at: float
    groups: list[TakenGroup]

    @property
    def uids(self) -> list[str]:
        return [group.uid for group in self.groups]

    def trained(self, account: StepAccount, calls: Sequence[EngineCall]) -> TrainedRound:
        """What is booked of it once the trainer has updated; ``calls`` are those that ended since the last booking."""
        return TrainedRound(
            step=self.step,
            start=self.start,
            admitted=account.admitted,
            phase=RolloutPhase(self.since, self.taken_at, tuple(calls)),
            groups=self.groups,
            filtered=account.filtered,
            gauges=account.metrics,
            waits={"wait_s": self.taken_at - self.asked_at},
        )
