"""The trainer's side of the rollout: verl's agent-loop manager, observed (noPR), and the one that runs rounds (PR).

A PR round, each step awaiting the one before::

    refill the manager's reserve -> workers may call engines -> manager opens the round
      -> batch complete -> workers stop calling, replicas abort -> workers have handed everything in -> take the batch

Every wait is raced against the workers' own ``serve`` calls, so the death of one surfaces at once and by name.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.utils.ray_utils import auto_await

from recipe.partial_rollout import metrics
from recipe.partial_rollout.agent_loop_worker import ObservedAgentLoopWorker, PartialRolloutAgentLoopWorker
from recipe.partial_rollout.batch import assemble_batch
from recipe.partial_rollout.config import PartialRolloutConfig
from recipe.partial_rollout.failures import one_line
from recipe.partial_rollout.llm_client import EngineCall, ObservedLLMClient, PartialRolloutLLMClient
from recipe.partial_rollout.manager_actor import ManagerActor, RolloutFailedError, RoundEnd, RoundStart
from recipe.partial_rollout.prompt_source import PromptSource, prompt_identity
from recipe.partial_rollout.run_trace import RunTrace
from recipe.partial_rollout.server_control import ServerControl, within
from recipe.partial_rollout.types import TakenGroup

T = TypeVar("T")

_IDENTITY = ("raw_prompt", "index")


@dataclass(frozen=True, slots=True)
class RolloutSite:
    """What the trainer lends the manager once its own parts exist."""

    settings: PartialRolloutConfig
    control: ServerControl
    trace: RunTrace
    source: PromptSource | None
    """None under noPR"""
    pad_id: int
    steps_per_epoch: int


class ObservedAgentLoopManager(AgentLoopManager):
    """verl's manager and workers; notes what each rollout phase cost. The batches are verl's own."""

    worker_class: type[ObservedAgentLoopWorker] = ObservedAgentLoopWorker
    client_class: type[ObservedLLMClient] = ObservedLLMClient

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(self.worker_class)
        super().__init__(*args, **kwargs)
        self.llm_client = self.client_class.over(self.llm_client)
        self.full_tokens_per_s: float | None = None
        self._step_metrics: dict[str, float] = {}

    def bind(self, site: RolloutSite) -> None:
        """Connect to the trainer's parts; called once, after its workers are up."""
        self._site = site
        self._settings = site.settings

    @property
    def full_concurrency(self) -> int:
        """Samples of one batch that can run at once: what "the engine kept full" means in every figure."""
        settings = self._settings
        return min(settings.batch_samples, settings.slots(len(self._site.control)))

    def take_step_metrics(self) -> dict[str, float]:
        """Figures of the last round, without the ``partial_rollout/`` prefix."""
        taken, self._step_metrics = self._step_metrics, {}
        return taken

    async def _take_calls(self) -> tuple[EngineCall, ...]:
        lists = await asyncio.gather(*[worker.take_calls.remote() for worker in self.agent_loop_workers])
        return tuple(call for calls in lists for call in calls)

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """``AgentLoopManager.generate_sequences``, timed."""
        start = time.time()
        output = await super().generate_sequences(prompts)
        phase = metrics.RolloutPhase(start, time.time(), await self._take_calls())
        if not prompts.meta_info.get("validate", False):
            self._note_batch(phase, prompts, output)
        else:
            self._site.trace.phase("validate", prompts.meta_info.get("global_steps", 0), phase.start, phase.end)
        return output

    def _note_batch(self, phase: metrics.RolloutPhase, prompts: DataProto, output: DataProto) -> None:
        """noPR: every sample started and ended in this phase, under one version."""
        step = prompts.meta_info["global_steps"]
        lengths = output.batch["attention_mask"][:, output.batch["prompts"].shape[1] :].sum(dim=1).tolist()
        tokens = output.batch["response_mask"].sum(dim=1).tolist()
        size, n = self._settings.batch_groups, self._settings.samples_per_group
        epoch_groups = self._site.steps_per_epoch * size
        trained = []
        for i in range(size):
            order = (step - 1) * size + i
            rows = slice(i * n, (i + 1) * n)
            trained.append(
                {
                    "group": order,
                    "prompt": prompt_identity({key: prompts.non_tensor_batch[key][i * n] for key in _IDENTITY}),
                    "epoch": order // epoch_groups,
                    "lengths": lengths[rows],
                    "staleness": [0] * n,
                    "tokens": sum(tokens[rows]),
                    "off_policy_tokens": 0,
                    "segments": [1] * n,
                }
            )
        self._step_metrics = {
            **metrics.phase_metrics(phase, self.full_concurrency, self.full_tokens_per_s),
            "trained/groups": size,
            "trained/samples": len(lengths),
            "trained/tokens": sum(tokens),
            "lost_samples": 0,
        }
        self._site.trace.round(
            step=step,
            version=step - 1,
            start=phase.start,
            end=phase.end,
            calls=phase.calls,
            interrupt_s=None,
            resume_s=None,
            trained=trained,
            carried_groups=0,
            lost_samples=0,
        )

    @auto_await
    async def probe(self, rows: list[dict[str, Any]], seconds: float) -> float:
        """Keep the engines full through the whole path for ``seconds``; returns decoded tokens per second.

        The samples are thrown away: nothing of the probe is trained.
        """
        share = math.ceil(self.full_concurrency / len(self.agent_loop_workers))
        # The first batch of an engine pays for compilation and caches.
        await self._keep_full(rows, share, until_calls=share)
        start, end, tokens = await self._keep_full(rows, share, seconds=seconds)
        self._site.trace.probe(start, end, tokens, share * len(self.agent_loop_workers))
        self.full_tokens_per_s = tokens / (end - start)
        return self.full_tokens_per_s

    async def _keep_full(
        self, rows: list[dict[str, Any]], share: int, *, seconds: float = 0.0, until_calls: int = 0
    ) -> tuple[float, float, int]:
        """Run ``share`` samples on each worker for ``seconds`` or until that many ended; (start, end, tokens)."""
        workers, deadlines = self.agent_loop_workers, self._settings.deadlines
        await self._take_calls()
        start = time.time()
        running = [worker.probe.remote(rows, share, until_calls) for worker in workers]
        pending = {asyncio.ensure_future(_result(ref)) for ref in running}
        done, _ = await asyncio.wait(
            pending, timeout=deadlines.stall_s if until_calls else seconds, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        if until_calls and not done:
            raise TimeoutError(
                f"warming the engines up: fewer than {until_calls} samples ended within {deadlines.stall_s:g} s "
                f"(partial_rollout.deadlines.stall_s)"
            )
        await asyncio.gather(*[worker.end_probe.remote() for worker in workers])
        await self._site.control.interrupt()
        end = time.time()
        await within(asyncio.gather(*pending), deadlines.reward_s, "ending the probe", "reward_s")
        await self._site.control.resume()
        return start, end, sum(call.tokens for call in await self._take_calls())


async def _result(ref: Awaitable[T]) -> T:
    return await ref


class PartialRolloutAgentLoopManager(ObservedAgentLoopManager):
    """Runs rounds: fills the slots of verl's batch with the N groups that a round completes."""

    worker_class = PartialRolloutAgentLoopWorker
    client_class = PartialRolloutLLMClient

    def bind(self, site: RolloutSite) -> None:
        """Start the manager actor and the workers' claim loops."""
        super().bind(site)
        settings = site.settings
        self._manager = (
            ray.remote(ManagerActor)
            .options(num_cpus=0, name=None)
            .remote(settings.admission(len(site.control)), settings.policy, settings.deadlines.stall_s)
        )
        capacity = math.ceil(settings.slots(len(site.control)) / len(self.agent_loop_workers))
        names = [f"agent_loop_worker_{i}" for i in range(len(self.agent_loop_workers))]
        pairs = list(zip(names, self.agent_loop_workers, strict=True))
        ray.get([worker.setup.remote(name, self._manager, capacity, site.control.servers) for name, worker in pairs])
        self._serving = {name: worker.serve.remote() for name, worker in pairs}
        self._unacknowledged: list[str] = []

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Validation: verl's own. Training: one round; row i of the result belongs to slot i // rollout.n.

        Raises:
            RolloutFailedError: a worker, replica, reward function or the manager failed; the message names it.
            TimeoutError: a wait passed its deadline.
        """
        if prompts.meta_info.get("validate", False):
            output = await super().generate_sequences(prompts)
            return output
        return await self._round(prompts)

    @auto_await
    async def acknowledge(self) -> None:
        """The trainer has updated on the last batch."""
        if self._unacknowledged:
            await self._manager.acknowledge.remote(self._unacknowledged)
            self._unacknowledged = []

    async def _round(self, slots: DataProto) -> DataProto:
        step = int(slots.meta_info["global_steps"])
        version = step - 1
        await self.acknowledge()
        began = time.time()
        opened = await self._supervised(self._open_round(version), "opening the round")
        ended = await self._supervised(_result(self._manager.wait_round.remote()), "the round")
        await self._supervised(self._interrupt(), "interrupting the round")
        quiet_at = time.time()
        groups = await self._supervised(_result(self._manager.take_batch.remote()), "taking the batch")
        self._unacknowledged = [group.uid for group in groups]
        size, n = self._settings.batch_groups, self._settings.samples_per_group
        if len(groups) != size:
            raise RolloutFailedError(f"the data ran out with {len(groups)} groups ready; a batch needs {size}")
        phase = metrics.RolloutPhase(began, quiet_at, await self._take_calls())
        await self._note_round(phase, step, opened, ended, groups)
        slot_uids = list(slots.non_tensor_batch["uid"][::n])
        rollout = self.rollout_config
        batch = assemble_batch(groups, slot_uids, rollout.prompt_length, rollout.response_length, self._site.pad_id)
        batch.meta_info["timing"] = metrics.timing_metrics(groups)
        return batch

    async def _open_round(self, version: int) -> RoundStart:
        source = self._site.source
        assert source is not None
        prompts = source.take(await self._manager.wanted.remote())
        await asyncio.gather(*[worker.open_round.remote() for worker in self.agent_loop_workers])
        return await self._manager.begin_round.remote(version, prompts, source.open)

    async def _interrupt(self) -> None:
        closing = [worker.close_round.remote() for worker in self.agent_loop_workers]
        await asyncio.gather(self._site.control.interrupt(), *closing)
        await within(
            asyncio.gather(*[worker.quiesce.remote() for worker in self.agent_loop_workers]),
            self._settings.deadlines.interrupt_s,
            "collecting the interrupted samples from the agent-loop workers",
            "interrupt_s",
        )

    async def _supervised(self, awaitable: Awaitable[T], what: str) -> T:
        """``awaitable``, or the error of the first worker that dies while it is awaited."""
        main = asyncio.ensure_future(awaitable)
        serving = {asyncio.ensure_future(_result(ref)): name for name, ref in self._serving.items()}
        try:
            await asyncio.wait({main, *serving}, return_when=asyncio.FIRST_COMPLETED)
            if main.done():
                return main.result()
            dead, name = next((task, name) for task, name in serving.items() if task.done())
            raise RolloutFailedError(f"{name} died during {what}: {one_line(dead.exception())}") from dead.exception()
        except RayActorError as error:
            raise RolloutFailedError(f"an actor died during {what}: {one_line(error)}") from error
        finally:
            for task in (main, *serving):
                task.cancel()

    async def _note_round(
        self, phase: metrics.RolloutPhase, step: int, opened: RoundStart, ended: RoundEnd, groups: list[TakenGroup]
    ) -> None:
        version = step - 1
        state = await self._manager.metrics.remote()
        first_call = min((call.start for call in phase.calls), default=opened.opened_at)
        interrupt_s = phase.end - ended.decided_at
        resume_s = first_call - opened.opened_at
        batch_groups = self._settings.batch_groups
        self._step_metrics = {
            **metrics.phase_metrics(phase, self.full_concurrency, self.full_tokens_per_s),
            **metrics.batch_metrics(groups, version),
            **state,
            "rollout/interrupt_s": interrupt_s,
            "rollout/resume_s": resume_s,
            "overlap": opened.carried_groups / batch_groups,
            "admission/admitted_this_round": opened.admitted,
        }
        self._site.trace.round(
            step=step,
            version=version,
            start=phase.start,
            end=phase.end,
            calls=phase.calls,
            interrupt_s=interrupt_s,
            resume_s=resume_s,
            trained=metrics.trained_records(groups, version),
            carried_groups=opened.carried_groups,
            lost_samples=int(state["lost_samples"]),
        )
