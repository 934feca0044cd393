"""verl's agent-loop manager with an account of its phases: noPR's rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.utils.ray_utils import auto_await

from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.rollout.engine_probe import EngineProbe, TakeCalls
from recipe.partial_rollout.rollout.observed_phases import ObservedPhases
from recipe.partial_rollout.rollout.rollout_context import RolloutContext
from recipe.partial_rollout.waits import result_of, within
from recipe.partial_rollout.worker.llm_client import ObservedLLMClient
from recipe.partial_rollout.worker.observed_worker import ObservedAgentLoopWorker


class ObservedAgentLoopManager(AgentLoopManager):
    """verl's manager and workers, which make the batches; an ``ObservedPhases`` notes the cost of each phase.

    verl constructs it before the trainer has all its parts; ``connect`` makes what needs them.
    """

    worker_class: type[ObservedAgentLoopWorker] = ObservedAgentLoopWorker
    client_class: type[ObservedLLMClient] = ObservedLLMClient

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(self.worker_class)
        super().__init__(*args, **kwargs)
        self.llm_client = self.client_class.over(self.llm_client)
        self._observed: ObservedPhases | None = None

    def connect(self, context: RolloutContext) -> None:
        """Observe for the trainer whose parts are ``context``; call it once, after the workers are up."""
        workers = self.agent_loop_workers
        self._observe(context, partial(_calls_of, workers, context.settings.deadlines.interrupt_s))

    def _observe(self, context: RolloutContext, take_calls: TakeCalls) -> None:
        probe = EngineProbe(context, self.agent_loop_workers, take_calls)
        self._observed = ObservedPhases(context, take_calls, probe)

    @property
    def _phases(self) -> ObservedPhases:
        assert self._observed is not None
        return self._observed

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """``AgentLoopManager.generate_sequences``, observed.

        Raises:
            StopTraining: the user asked for it during a validation.
        """
        validates = prompts.meta_info.get("validate", False)
        observe = self._phases.validate if validates else self._phases.batch
        output = await observe(prompts, super().generate_sequences(prompts))
        return output

    def take_step_metrics(self) -> dict[str, float]:
        """``ObservedPhases.take_step_metrics``."""
        return self._phases.take_step_metrics()

    @auto_await
    async def probe(self, rows: list[dict[str, Any]], seconds: float) -> float:
        """``EngineProbe.measure``."""
        return await self._phases.probe.measure(rows, seconds)

    @property
    def full_concurrency(self) -> int:
        """``RolloutContext.full_concurrency``."""
        return self._phases.probe.concurrency


async def _calls_of(workers: Sequence[Any], deadline_s: float) -> tuple[EngineCall, ...]:
    """The engine calls of all workers that ended since they were last asked."""
    asked = asyncio.gather(*[result_of(worker.take_calls.remote()) for worker in workers])
    lists = await within(asked, deadline_s, "asking the agent-loop workers for their engine calls", "interrupt_s")
    return tuple(call for calls in lists for call in calls)
