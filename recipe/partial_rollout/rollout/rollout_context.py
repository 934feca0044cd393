"""The trainer's parts that rollout phases need, in both arms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tqdm import tqdm

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.records.ledger import Ledger
from recipe.partial_rollout.records.run_trace import RunTrace
from recipe.partial_rollout.rollout.kv_slots import ReplicaSlots, SampleSizes
from recipe.partial_rollout.rollout.prompt_source import PromptSource
from recipe.partial_rollout.rollout.server_control import ServerControl
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.rollout.trainer_watch import TrainerWatch


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """The trainer's parts, passed on once they exist."""

    settings: PartialRolloutConfig
    control: ServerControl
    slots: ReplicaSlots
    sizes: SampleSizes
    trace: RunTrace
    source: PromptSource | None
    """None under noPR"""
    ledger: Ledger | None
    """None under noPR"""
    stop: StopSignals
    trainers: TrainerWatch
    pad_id: int
    steps_per_epoch: int
    last_step: int
    """last step of the training; no round comes after it"""

    @property
    def full_concurrency(self) -> int:
        """Samples of one batch that can run at once; "the engine kept full" means this number in every figure."""
        return min(self.settings.batch_samples, self.slots.per_replica * len(self.control))

    async def engine_metrics(self) -> dict[str, float]:
        """Slots of a replica and, if the engines count them, the requests preempted since the last step."""
        figures: dict[str, float] = {"rollout/slots_per_replica": self.slots.per_replica}
        preemptions = await self.control.new_preemptions()
        return figures if preemptions is None else {**figures, "rollout/preemptions": preemptions}

    def reckon_slots(self, calls: Iterable[EngineCall]) -> None:
        """Adjust the slots to the contexts of the round that made ``calls``."""
        if (line := self.slots.observe(calls)) is not None:
            tqdm.write(line)
