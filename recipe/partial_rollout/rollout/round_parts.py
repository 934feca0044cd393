"""What both placements play with: colocated ``Rounds``, and the ``Stream`` of separate placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from recipe.partial_rollout.manager.output_store import OutputStore
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.replica_roster import ReplicaRoster
from recipe.partial_rollout.rollout.rollout_context import RolloutContext
from recipe.partial_rollout.rollout.worker_pool import WorkerPool
from recipe.partial_rollout.rollout.worker_slots import WorkerSlots

if TYPE_CHECKING:
    from recipe.partial_rollout.rollout.overlap_control import OverlapControl
    from recipe.partial_rollout.rollout.round_book import RoundBook


@dataclass(frozen=True, slots=True)
class RoundParts:
    """The parts of a rollout, connected to each other."""

    context: RolloutContext
    """parts of the trainer"""
    manager: Any
    """handle of the manager actor"""
    store: OutputStore
    """holds the outputs of finished samples"""
    pool: WorkerPool
    """the agent-loop workers, connected to ``manager``"""
    roster: ReplicaRoster
    """announces restarted replicas"""
    slots: WorkerSlots
    """slots of each worker"""
    overlap: OverlapControl | None
    """of ``overlap=auto``; None if it is fixed"""
    book: RoundBook
    """books what is trained"""
    guard: Guard
    """of the driver's waits"""

    async def steer(self) -> None:
        """Apply the overlap that ``overlap=auto`` has decided on, if it is a new one, to what is admitted from here on."""
        if self.overlap is not None and (change := self.overlap.poll()) is not None:
            await self.guard.wait(self.manager.set_overlap.remote(change.overlap), "changing the overlap")
            tqdm.write(f"partial_rollout.overlap is now {change.overlap:g}: {change.reason}")
