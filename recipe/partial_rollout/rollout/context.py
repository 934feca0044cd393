"""What the driver's waits and books need of a run, in both arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipe.partial_rollout.config.settings import PartialRolloutConfig
    from recipe.partial_rollout.records.run_log import RunLog
    from recipe.partial_rollout.rollout.prompt_source import PromptSource
    from recipe.partial_rollout.rollout.replicas import ServerControl
    from recipe.partial_rollout.rollout.slots import ReplicaSlots
    from recipe.partial_rollout.rollout.stop import StopSignals


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Parts of a run, passed on once they exist."""

    settings: PartialRolloutConfig
    control: ServerControl
    slots: ReplicaSlots
    log: RunLog
    source: PromptSource | None
    """None under noPR"""
    stop: StopSignals
    trainers: Sequence[Any]
    """handles of the trainer workers, in the order of their ranks"""
    steps_per_epoch: int
    last_step: int
    """last step of the training; no version is rolled out after it"""
    figures: dict[str, float]
    """metrics of the step that is logged next, without the ``partial_rollout/`` prefix"""

    def slots_of_a_worker(self, workers: int) -> int:
        """The share of the replicas' slots that each of ``workers`` has."""
        return math.ceil(self.slots.per_replica * len(self.control) / workers)

    @property
    def full_concurrency(self) -> int:
        """Samples of one batch that can run at once."""
        return min(self.settings.batch_samples, self.slots.per_replica * len(self.control))

    async def engine_metrics(self) -> dict[str, float]:
        """Slots of a replica and, if the engines count them, the requests preempted since the last step."""
        figures: dict[str, float] = {"rollout/slots_per_replica": self.slots.per_replica}
        preemptions = await self.control.new_preemptions()
        return figures if preemptions is None else {**figures, "rollout/preemptions": preemptions}
