"""verl's agent-loop manager under PR: verl's trainer calls it; ``Rounds`` (colocated) or ``Stream`` (separate) answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.protocol import DataProto
from verl.utils.ray_utils import auto_await

from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.failure_policy import FailurePolicy
from recipe.partial_rollout.manager.group_filter import GroupFilter
from recipe.partial_rollout.manager.output_store import RayObjects
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.observed_manager import ObservedAgentLoopManager
from recipe.partial_rollout.rollout.overlap_control import OverlapControl
from recipe.partial_rollout.rollout.replica_roster import ReplicaRoster
from recipe.partial_rollout.rollout.rollout_context import RolloutContext
from recipe.partial_rollout.rollout.round_book import RoundBook
from recipe.partial_rollout.rollout.round_parts import RoundParts
from recipe.partial_rollout.rollout.rounds import Rounds
from recipe.partial_rollout.rollout.split_calls import SplitCalls
from recipe.partial_rollout.rollout.stream import Stream
from recipe.partial_rollout.rollout.sync_frame import HeldReplicas, QuietReplicas, SyncFrame
from recipe.partial_rollout.rollout.worker_pool import WorkerPool
from recipe.partial_rollout.rollout.worker_slots import WorkerSlots
from recipe.partial_rollout.worker.agent_loop_worker import PartialRolloutAgentLoopWorker
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient


class PartialRolloutAgentLoopManager(ObservedAgentLoopManager):
    """Forwards to its ``Rounds`` or ``Stream``, which have the same verbs; validation is verl's own, observed."""

    worker_class = PartialRolloutAgentLoopWorker
    client_class = PartialRolloutLLMClient

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connected: Rounds | Stream | None = None

    def connect(self, context: RolloutContext) -> None:
        """Start the manager actor and the workers' claim loops; called once, after the workers are up."""
        settings, control, workers = context.settings, context.control, self.agent_loop_workers
        store = RayObjects(settings.deadlines.interrupt_s)
        manager = _start_manager(context, store)
        slots = WorkerSlots(context, len(workers), manager)
        roster = ReplicaRoster(
            control, self.llm_client._load_balancer, context.trace, len(workers), settings.deadlines.interrupt_s
        )

        async def introduce(i: int, name: str, worker: Any) -> None:
            await worker.connect.remote(name, manager, slots.per_worker, roster.choice_of(i))

        pool = WorkerPool(
            workers,
            spawn=self._spawn,
            connect=introduce,
            restarts=settings.failures.worker_restarts,
            deadlines=settings.deadlines,
            stop=context.stop,
        )
        overlap = OverlapControl.of(settings, len(control), lambda: context.slots.per_replica)
        guard = Guard(context, manager, pool)
        split = SplitCalls(pool, guard)
        self._observe(context, split.take_others if settings.separate else pool.take_calls)
        book = RoundBook(context, self._phases.probe, overlap)
        parts = RoundParts(context, manager, store, pool, roster, slots, overlap, book, guard)
        self._connected = Stream(parts, split) if settings.separate else Rounds(parts)
        auto_await(pool.start)()

    def _spawn(self, i: int) -> Any:
        """A new worker, made as in verl's ``_init_agent_loop_workers``, but on the driver's node."""
        return on_this_node(self.agent_loop_workers_class).remote(  # type: ignore[attr-defined]
            self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles
        )

    @property
    def _rounds(self) -> Rounds | Stream:
        assert self._connected is not None
        return self._connected

    def sync_frame(self, context: RolloutContext) -> SyncFrame:
        """What a weight sync does around its transfer; after ``connect``."""
        if isinstance(self._connected, Stream):
            return HeldReplicas(context.control, self._connected)
        return QuietReplicas(context.control)

    def begin(self) -> None:
        """``Stream.begin``; colocated rounds begin one by one."""
        if isinstance(self._connected, Stream):
            self._connected.begin()

    @auto_await
    async def end(self) -> None:
        """``Stream.end``; a colocated round has ended by itself."""
        if isinstance(self._connected, Stream):
            await self._connected.end()

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Validation: verl's own. Training: ``play``, which fills the slots of ``prompts``."""
        if not prompts.meta_info.get("validate", False):
            return await self._rounds.play(prompts)
        await self._rounds.make_way_for_validation()
        output = await super().generate_sequences(prompts)
        return output

    @auto_await
    async def finish_round(self) -> None:
        """``Rounds.finish_round``."""
        await self._rounds.finish_round()

    @auto_await
    async def save(self, path: Path) -> Any:
        """``Rounds.save``."""
        return await self._rounds.save(path)

    @auto_await
    async def load(self, path: Path, step: int) -> None:
        """``Rounds.load``."""
        await self._rounds.load(path, step)

    @property
    def exhausted(self) -> bool:
        """``Rounds.exhausted``."""
        return self._rounds.exhausted

    def take_step_metrics(self) -> dict[str, float]:
        """``Rounds.take_step_metrics``."""
        return self._rounds.take_step_metrics()


def _start_manager(context: RolloutContext, store: RayObjects) -> Any:
    """The manager actor's handle."""
    settings = context.settings
    # With dynamic sampling it is unknown how many prompts the training will consume, only how many it will train.
    bounded = settings.group_filter is not None and settings.drain
    train_groups = context.last_step * settings.batch_groups if bounded else None
    return on_this_node(ray.remote(ManagerActor)).remote(
        replace(Admission.of(settings), train_groups=train_groups),
        settings.scheduling,
        settings.deadlines.stall_s,
        FailurePolicy.of(settings.failures),
        GroupFilter.of(settings.group_filter),
        store,
    )


def on_this_node(actor_class: Any) -> Any:
    """The Ray actor class ``actor_class`` on the driver's node, whose death ends the run in any case.

    Left to itself, Ray may place an actor on a node that has died without its notice, which comes some 15 s late. No CPU is
    asked for: all of this node's may be taken, and the actor would wait for one.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return actor_class.options(num_cpus=0, scheduling_strategy=here)
