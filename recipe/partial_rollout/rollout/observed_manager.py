"""verl's agent-loop manager, observed: what noPR runs, and what the manager of partial rollout adds rounds to."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Any

import ray
from tqdm import tqdm
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.utils.ray_utils import auto_await

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.records.ledger import Ledger
from recipe.partial_rollout.records.rollout_phase import RolloutPhase
from recipe.partial_rollout.records.round import Round
from recipe.partial_rollout.records.run_trace import RunTrace
from recipe.partial_rollout.records.trained_group import TrainedGroup, prompt_identity
from recipe.partial_rollout.rollout import metrics
from recipe.partial_rollout.rollout.kv_slots import ReplicaSlots
from recipe.partial_rollout.rollout.prompt_source import PromptSource
from recipe.partial_rollout.rollout.server_control import ServerControl
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.waits import result_of, within
from recipe.partial_rollout.worker.llm_client import ObservedLLMClient
from recipe.partial_rollout.worker.observed_worker import ObservedAgentLoopWorker

_IDENTITY = ("raw_prompt", "index")


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What the trainer lends the manager once its own parts exist."""

    settings: PartialRolloutConfig
    control: ServerControl
    slots: ReplicaSlots
    trace: RunTrace
    source: PromptSource | None
    """None under noPR"""
    ledger: Ledger | None
    """likewise"""
    stop: StopSignals
    pad_id: int
    steps_per_epoch: int
    last_step: int
    """of the training: no round comes after it"""


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

    def bind(self, context: RolloutContext) -> None:
        """Connect to the trainer's parts; called once, after its workers are up."""
        self._context = context
        self._settings = context.settings

    async def _engine_metrics(self) -> dict[str, float]:
        """Slots of a replica, and the requests that the engines preempted since the last step where they count them."""
        figures: dict[str, float] = {"rollout/slots_per_replica": self._context.slots.per_replica}
        preemptions = await self._context.control.new_preemptions()
        return figures if preemptions is None else {**figures, "rollout/preemptions": preemptions}

    async def _reckon_slots(self, calls: tuple[EngineCall, ...]) -> None:
        """Have the slots follow what samples held in the round that made ``calls``."""
        if (line := self._context.slots.observe(calls)) is not None:
            tqdm.write(line)

    @property
    def full_concurrency(self) -> int:
        """Samples of one batch that can run at once: what "the engine kept full" means in every figure."""
        return min(self._settings.batch_samples, self._context.slots.per_replica * len(self._context.control))

    def take_step_metrics(self) -> dict[str, float]:
        """Figures of the last round, without the ``partial_rollout/`` prefix."""
        taken, self._step_metrics = self._step_metrics, {}
        return taken

    async def _take_calls(self) -> tuple[EngineCall, ...]:
        lists = await asyncio.gather(*[worker.take_calls.remote() for worker in self.agent_loop_workers])
        return tuple(call for calls in lists for call in calls)

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """``AgentLoopManager.generate_sequences``, timed.

        Raises:
            StopTraining: the user asked for it in a validation.
        """
        start = time.time()
        generated = super().generate_sequences(prompts)
        if prompts.meta_info.get("validate", False):
            generated = self._context.stop.unless_stopped(generated)
        output = await generated
        phase = RolloutPhase(start, time.time(), await self._take_calls())
        if not prompts.meta_info.get("validate", False):
            self._note_batch(phase, prompts, output)
            self._step_metrics |= await self._engine_metrics()
            await self._reckon_slots(phase.calls)
        else:
            self._context.trace.phase("validate", prompts.meta_info.get("global_steps", 0), phase.start, phase.end)
        return output

    def _note_batch(self, phase: RolloutPhase, prompts: DataProto, output: DataProto) -> None:
        """noPR: every sample started and ended in this phase, under one version."""
        step = prompts.meta_info["global_steps"]
        lengths = output.batch["attention_mask"][:, output.batch["prompts"].shape[1] :].sum(dim=1).tolist()
        tokens = output.batch["response_mask"].sum(dim=1).tolist()
        size, n = self._settings.batch_groups, self._settings.samples_per_group
        epoch_groups = self._context.steps_per_epoch * size
        trained = []
        for i in range(size):
            order = (step - 1) * size + i
            rows = slice(i * n, (i + 1) * n)
            trained.append(
                TrainedGroup(
                    order=order,
                    epoch=order // epoch_groups,
                    lengths=lengths[rows],
                    staleness=[0] * n,
                    prompt=prompt_identity({key: prompts.non_tensor_batch[key][i * n] for key in _IDENTITY}),
                    segments=[1] * n,
                    tokens=sum(tokens[rows]),
                )
            )
        self._step_metrics = {
            **metrics.phase_metrics(phase, self.full_concurrency, self.full_tokens_per_s),
            "trained/groups": size,
            "trained/samples": len(lengths),
            "trained/tokens": sum(tokens),
            "lost_samples": 0,
        }
        self._context.trace.round(Round(step, step - 1, phase, trained))

    @auto_await
    async def probe(self, rows: list[dict[str, Any]], seconds: float) -> float:
        """Keep the engines full through the whole path for twice ``seconds``; decoded tokens per second of the second half.

        Before that they are warmed up: on a machine without caches an engine may compile for longer than the probe
        takes. In the first half the samples are younger, so cheaper to decode, than those of a round. All are thrown
        away: nothing of the probe is trained.
        """
        share = math.ceil(self.full_concurrency / len(self.agent_loop_workers))
        await within(
            asyncio.gather(*[result_of(w.warm_up.remote(rows, share)) for w in self.agent_loop_workers]),
            self._settings.deadlines.stall_s,
            "warming the engines up",
            "stall_s",
        )
        calls, end = await self._keep_full(rows, share, 2 * seconds)
        tokens = sum(call.tokens_within(end - seconds, end) for call in calls)
        self._context.trace.probe(end - seconds, end, round(tokens), share * len(self.agent_loop_workers))
        self.full_tokens_per_s = tokens / seconds
        return self.full_tokens_per_s

    async def _keep_full(
        self, rows: list[dict[str, Any]], share: int, seconds: float
    ) -> tuple[tuple[EngineCall, ...], float]:
        """Run ``share`` samples on each worker for ``seconds``; their engine calls, and when the engines were quiet."""
        workers = self.agent_loop_workers
        await self._take_calls()
        running = [asyncio.ensure_future(result_of(worker.probe.remote(rows, share))) for worker in workers]
        done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        reward_s = self._settings.deadlines.reward_s
        await within(
            asyncio.gather(*[result_of(w.end_probe.remote()) for w in workers]),
            reward_s,
            "ending the probe",
            "reward_s",
        )
        await self._context.control.interrupt()
        end = time.time()
        await within(asyncio.gather(*running), reward_s, "the last samples of the probe", "reward_s")
        await self._context.control.resume()
        # What the probe had preempted is no round's.
        await self._context.control.new_preemptions()
        return await self._take_calls(), end
