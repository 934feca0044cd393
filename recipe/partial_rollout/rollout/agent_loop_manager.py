"""Rounds of partial rollout: from verl's empty batch slots to the N groups that a round completes.

A round, each step awaiting the one before::

    next round is prepared -> workers may call engines -> batch complete -> workers stop calling, replicas abort -> take it

While the trainer updates, the workers report what the round left unfinished; then the manager admits the prompts of the
next round and grants its samples, which wait at their workers' gates. No engine waits for any of this.

Every wait is raced against the workers' own ``serve`` calls: one that dies is replaced and its samples go on elsewhere.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError
from tqdm import tqdm
from verl.protocol import DataProto
from verl.utils.ray_utils import auto_await

from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.failure_policy import FailurePolicy
from recipe.partial_rollout.manager.group_filter import GroupFilter
from recipe.partial_rollout.manager.messages import Flushed, PromptsWanted, RolloutFailedError, RoundEnd, RoundStart
from recipe.partial_rollout.manager.output_store import RayObjects, fetch_groups
from recipe.partial_rollout.manager.types import FilteredGroup, TakenGroup
from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.records.rollout_phase import RolloutPhase
from recipe.partial_rollout.records.round import Round
from recipe.partial_rollout.records.trained_group import TrainedGroup
from recipe.partial_rollout.rollout import metrics
from recipe.partial_rollout.rollout.batch import assemble_batch
from recipe.partial_rollout.rollout.engine_watch import ASKED_IN_A_STALL, watch_engines
from recipe.partial_rollout.rollout.observed_manager import ObservedAgentLoopManager, RolloutContext
from recipe.partial_rollout.rollout.overlap_control import OverlapControl
from recipe.partial_rollout.rollout.played_round import PlayedRound, check_batch
from recipe.partial_rollout.rollout.stop import StopTraining
from recipe.partial_rollout.rollout.worker_pool import WorkerPool
from recipe.partial_rollout.waits import one_line, result_of, within
from recipe.partial_rollout.worker.agent_loop_worker import PartialRolloutAgentLoopWorker
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient
from recipe.partial_rollout.worker.replica_choice import ReplicaChoice

T = TypeVar("T")


class PartialRolloutAgentLoopManager(ObservedAgentLoopManager):
    """Runs rounds: fills the slots of verl's batch with the N groups that a round completes."""

    worker_class = PartialRolloutAgentLoopWorker
    client_class = PartialRolloutLLMClient

    def bind(self, context: RolloutContext) -> None:
        """Start the manager actor and the workers' claim loops."""
        super().bind(context)
        settings = context.settings
        self._store = RayObjects(settings.deadlines.interrupt_s)
        self._manager = (
            ray.remote(ManagerActor)
            .options(num_cpus=0)
            .remote(
                replace(Admission.of(settings), train_groups=self._train_groups(context)),
                settings.policy,
                settings.deadlines.stall_s,
                FailurePolicy.of(settings.failures),
                GroupFilter.of(settings.group_filter),
                self._store,
            )
        )
        self._unacknowledged: list[TakenGroup] = []
        self._step = 0
        self._played: PlayedRound | None = None
        self._prepared: Any = None
        """reference: ``RoundStart`` of the next round"""
        self._exhausted = False
        self._known_restarts = 0
        self._addresses = context.control.addresses
        self._capacity = self._slots_per_worker
        self._overlap = OverlapControl.of(settings, len(context.control), lambda: context.slots.per_replica)
        self._pool = WorkerPool(
            self.agent_loop_workers,
            spawn=self._spawn,
            connect=self._connect,
            restarts=settings.failures.worker_restarts,
            deadline_s=settings.deadlines.worker_start_s,
        )
        self._spared = 0
        connecting: Any = self._connect_all()
        assert connecting is None

    @staticmethod
    def _train_groups(context: RolloutContext) -> int | None:
        """With dynamic sampling nobody knows beforehand how many prompts the training consumes, only how many it trains."""
        settings = context.settings
        bounded = settings.group_filter is not None and settings.drain
        return context.last_step * settings.batch_groups if bounded else None

    @property
    def _slots_per_worker(self) -> int:
        return math.ceil(self._context.slots.per_replica * len(self._context.control) / len(self.agent_loop_workers))

    @auto_await
    async def _connect_all(self) -> None:
        await self._pool.start()

    async def _connect(self, i: int, name: str, worker: Any) -> None:
        await worker.connect.remote(name, self._manager, self._capacity, self._replicas_of(i))

    def _replicas_of(self, i: int) -> ReplicaChoice:
        return ReplicaChoice(self._context.control.servers, place=i / len(self.agent_loop_workers))

    def _spawn(self, i: int) -> Any:
        """A new worker, as verl's ``_init_agent_loop_workers`` makes them; Ray places it on a node that is alive."""
        return self.agent_loop_workers_class.remote(  # type: ignore[attr-defined]
            self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles
        )

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Validation: verl's own. Training: one round; row i of the result belongs to slot i // rollout.n.

        Raises:
            RolloutFailedError: a worker, replica, reward function or the manager failed; the message names it.
            TimeoutError: a wait passed its deadline.
            StopTraining: the user asked for it; the round is interrupted, and the manager knows of everything decoded.
        """
        if prompts.meta_info.get("validate", False):
            # The calls of the last round are not validation's; a replica that was restarted for the weight sync takes part.
            await self._flush()
            await self._meet_new_replicas()
            output = await super().generate_sequences(prompts)
            return output
        return await self._round(prompts)

    @auto_await
    async def acknowledge(self) -> None:
        """The trainer has updated on the last batch."""
        await self._flush()
        if self._unacknowledged:
            groups, self._unacknowledged = self._unacknowledged, []
            await self._manager.acknowledge.remote([group.uid for group in groups])
            assert self._context.ledger is not None
            self._context.ledger.trained(self._step, self._step - 1, groups)

    @auto_await
    async def save(self, path: Path) -> Any:
        """Write the manager's state to ``path``; returns the actor's account of it (``Written``)."""
        await self._flush()
        return await self._manager.save.remote(str(path))

    @auto_await
    async def load(self, path: Path, step: int) -> None:
        """Take over the state at ``path``, that of ``step``'s checkpoint, before the first round."""
        await self._manager.load.remote(str(path))
        if self._settings.group_filter is not None:
            self._spared = int((await self._manager.metrics.remote())["filter/spared_total"])
            # The data may have ended before the checkpoint: ``exhausted`` must say so before the first slot.
            self._prepare(step, await self._manager.wanted.remote())
            await self._readied()

    @property
    def exhausted(self) -> bool:
        """Whether the data has ended with fewer prompts left than a batch needs; known once the last round is flushed."""
        return self._exhausted

    @auto_await
    async def take_step_metrics(self) -> dict[str, float]:  # type: ignore[override]
        """As of noPR, once everything of the last round has been reported."""
        await self._flush()
        return super().take_step_metrics()

    # -- rounds ----------------------------------------------------------------------------------------------------

    async def _round(self, slots: DataProto) -> DataProto:
        step = int(slots.meta_info["global_steps"])
        version = step - 1
        await self.acknowledge()
        self._step = step
        began = time.time()
        self._context.trace.begin(step)
        start, opened_at = await self._supervised(self._open_round(version), "opening the round")
        try:
            ended = await self._until_complete()
        except StopTraining:
            await self._manager.suspend_round.remote()
            await self._supervised(self._interrupt(), "interrupting the round")
            await self._supervised(self._collect(*self._begin_collecting()), "collecting the interrupted samples")
            raise
        await self._supervised(self._interrupt(), "interrupting the round")
        quiet_at = time.time()
        groups = await self._supervised(self._take_batch(), "taking the batch")
        self._unacknowledged = groups
        check_batch(groups, self._settings.batch_groups, self._settings.failures.max_masked_fraction)
        self._played = PlayedRound(step, start, ended, began, opened_at, quiet_at, groups, *self._begin_collecting())
        if step < self._context.last_step:
            self._prepare(version + 1, ended.wanted)
        slot_uids = list(slots.non_tensor_batch["uid"][:: self._settings.samples_per_group])
        rollout = self.rollout_config
        batch = assemble_batch(groups, slot_uids, rollout.prompt_length, rollout.response_length, self._context.pad_id)
        batch.meta_info["timing"] = metrics.timing_metrics(groups)
        return batch

    async def _until_complete(self) -> RoundEnd:
        """Wait for the batch, with prompts for as many groups as dynamic sampling replaces."""
        while True:
            ended = await self._supervised(self._context.stop.unless_stopped(self._wait_round()), "the round")
            if not isinstance(ended, PromptsWanted):
                return ended
            source = self._context.source
            assert source is not None
            prompts = source.take(ended.count)
            await self._supervised(
                result_of(self._manager.offer.remote(prompts, source.left)), "offering prompts in the round"
            )

    async def _wait_round(self) -> RoundEnd | PromptsWanted:
        every_s = self._settings.deadlines.stall_s / ASKED_IN_A_STALL
        watching = asyncio.ensure_future(
            watch_engines(self._context.control.running_tokens, every_s, self._manager.note_decoding.remote)
        )
        try:
            return await self._manager.wait_round.remote()
        finally:
            watching.cancel()

    async def _take_batch(self) -> list[TakenGroup]:
        taken = await self._manager.take_batch.remote()
        return await asyncio.to_thread(fetch_groups, taken, self._store.fetch)

    def _prepare(self, version: int, wanted: int) -> None:
        """Have the manager grant the samples of the round under ``version`` as soon as the last one is flushed."""
        source = self._context.source
        assert source is not None
        prompts = source.take(wanted)
        self._prepared = self._manager.prepare_round.remote(version, prompts, source.left)

    async def _open_round(self, version: int) -> tuple[RoundStart, float]:
        """With the moment from which the workers could call the engines (unix seconds)."""
        await self._meet_new_replicas()
        await self._steer()
        if self._prepared is None:
            self._prepare(version, await self._manager.wanted.remote())
        start = await self._readied()
        self._prepared = None
        opened_at = time.time()
        await self._pool.open_round()
        return start, opened_at

    async def _readied(self) -> RoundStart:
        what = "preparing the round, once the workers have reported of the last one,"
        start = await within(result_of(self._prepared), self._settings.deadlines.interrupt_s, what, "interrupt_s")
        self._exhausted = start.exhausted
        return start

    async def _flush(self) -> None:
        """Everything of the last round has been reported and is noted, and the next one is prepared."""
        if self._played is None:
            return
        played, self._played = self._played, None
        waiting_since = time.time()
        flushed = await self._supervised(
            self._collect(played.flushing, played.flushed), "collecting the interrupted samples"
        )
        flush_s = time.time() - waiting_since
        calls = await self._supervised(
            within(
                self._take_calls(),
                self._settings.deadlines.interrupt_s,
                "asking the agent-loop workers for their engine calls",
                "interrupt_s",
            ),
            "collecting the engine calls",
        )
        filtered: tuple[FilteredGroup, ...] = ()
        if self._settings.group_filter is not None:
            filtered = await self._supervised(
                result_of(self._manager.take_filtered.remote()), "collecting the filtered groups"
            )
        self._note_round(played, flushed, calls, flush_s, filtered)
        self._step_metrics |= await self._engine_metrics()
        await self._reckon_slots(calls)
        if self._prepared is not None:
            await self._supervised(self._readied(), "preparing the next round")

    async def _reckon_slots(self, calls: tuple[EngineCall, ...]) -> None:
        """Also in the manager: samples that it has granted already keep their slots."""
        await super()._reckon_slots(calls)
        if self._capacity != self._slots_per_worker:
            self._capacity = self._slots_per_worker
            await self._manager.resize_workers.remote(self._capacity)

    async def _steer(self) -> None:
        """Put into force, for rounds that are yet to be prepared, what the overlap control has decided."""
        if self._overlap is not None and (decision := self._overlap.poll()) is not None:
            await self._manager.set_overlap.remote(decision.overlap)
            tqdm.write(f"partial_rollout.overlap is now {decision.overlap:g}: {decision.reason}")

    async def _meet_new_replicas(self) -> None:
        """Tell workers, verl's load balancer (validation) and the trace of replicas that were restarted."""
        control = self._context.control
        if control.restarted == self._known_restarts:
            return
        self._known_restarts = control.restarted
        balancer = self.llm_client._load_balancer
        gone = [address for address in self._addresses if address not in control.servers]
        new = {address: server for address, server in control.servers.items() if address not in self._addresses}
        await balancer.remove_servers.remote(gone)
        await balancer.add_servers.remote(new)
        await self._pool.ask_each("use_replicas", self._replicas_of)
        self._addresses = control.addresses
        self._context.trace.use_replicas(control.addresses)

    async def _interrupt(self) -> None:
        await asyncio.gather(self._context.control.interrupt(), self._pool.close_round())

    def _begin_collecting(self) -> tuple[list[Any], Any]:
        """References: each worker has reported everything; the manager has heard from all of them."""
        return self._pool.begin("flush"), self._manager.flush.remote()

    async def _collect(self, flushing: list[Any], flushed: Any) -> Flushed:
        async def both() -> Flushed:
            await self._pool.answers(flushing)
            return await flushed

        return await within(
            both(),
            self._settings.deadlines.interrupt_s,
            "collecting the interrupted samples from the agent-loop workers",
            "interrupt_s",
        )

    async def _supervised(self, awaitable: Awaitable[T], what: str) -> T:
        """``awaitable``, while dead workers are replaced."""
        try:
            return await self._pool.while_serving(
                awaitable, what, release=lambda name: result_of(self._manager.release_worker.remote(name))
            )
        except RayActorError as error:
            raise RolloutFailedError(f"an actor died during {what}: {one_line(error)}") from error

    async def _take_calls(self) -> tuple[EngineCall, ...]:
        return tuple(call for calls in await self._pool.ask("take_calls") for call in calls)

    def _note_round(
        self,
        played: PlayedRound,
        flushed: Flushed,
        calls: tuple[EngineCall, ...],
        flush_s: float,
        filtered: tuple[FilteredGroup, ...],
    ) -> None:
        step, version, groups = played.step, played.step - 1, played.groups
        assert self._context.ledger is not None
        self._context.ledger.admitted(step, version, played.end.admitted)
        phase = RolloutPhase(played.began, played.quiet_at, calls)
        waits = {**played.waits(flushed, calls), "flush_s": flush_s}
        if self._overlap is not None:
            self._overlap.observe(phase.calls, [[output.response_length for output in g.outputs] for g in groups])
        self._step_metrics = {
            **metrics.phase_metrics(phase, self.full_concurrency, self.full_tokens_per_s),
            **metrics.batch_metrics(groups, version),
            **flushed.metrics,
            **{f"timing/{name}": seconds for name, seconds in waits.items()},
            "overlap": played.start.carried_groups / self._settings.batch_groups,
            "admission/admitted": played.start.admitted,
            "failures/workers_restarted_total": self._pool.restarted,
            "failures/replicas_restarted_total": self._context.control.restarted,
            **(self._overlap.metrics() if self._overlap is not None else {}),
            **self._note_filtered(step, version, filtered, flushed),
        }
        self._context.trace.round(
            Round(
                step=step,
                version=version,
                phase=phase,
                trained=[TrainedGroup.of(group, version) for group in groups],
                interrupt_s=waits["interrupt_s"],
                resume_s=waits["resume_s"],
                carried_groups=played.start.carried_groups,
                lost_samples=int(flushed.metrics["lost_samples"]),
            )
        )

    def _note_filtered(
        self, step: int, version: int, filtered: tuple[FilteredGroup, ...], flushed: Flushed
    ) -> dict[str, float]:
        """Book what dynamic sampling did in ``step``; its figures: groups filtered, and consumed with the trained ones."""
        group_filter, ledger = self._settings.group_filter, self._context.ledger
        if group_filter is None:
            return {}
        assert ledger is not None
        if filtered:
            ledger.filtered(step, version, filtered)
        spared = int(flushed.metrics["filter/spared_total"]) - self._spared
        self._spared += spared
        if spared > 0:
            limit = f"algorithm.filter_groups.max_num_gen_batches={group_filter.max_num_gen_batches}"
            tqdm.write(
                f"step {step}: groups of equal {group_filter.metric} that are trained all the same: {spared} "
                f"(past the round's limit, {limit}, or the data ends)"
            )
        return {"filter/groups": len(filtered), "filter/consumed": len(filtered) + self._settings.batch_groups}
