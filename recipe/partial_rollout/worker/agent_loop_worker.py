"""verl's agent-loop worker under PR: runs the samples that its ``ClaimLoop`` claims; any engine call can be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from recipe.partial_rollout.config.choices import Placement
from recipe.partial_rollout.manager.codec import check_saveable
from recipe.partial_rollout.manager.types import Grant, SampleOutput
from recipe.partial_rollout.worker.claim_loop import ClaimLoop
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient
from recipe.partial_rollout.worker.observed_worker import ObservedAgentLoopWorker, trajectory_of
from recipe.partial_rollout.worker.probe_slots import ProbeEndedError, ProbeSlots
from recipe.partial_rollout.worker.replica_choice import ReplicaChoice
from recipe.partial_rollout.worker.tool_journal import journaled
from recipe.partial_rollout.worker.turn_alignment import sample_output

_FREES_SLOT_AFTER_S = 0.1
"""a reward call longer than this gives the slot back meanwhile; most end sooner, and one report says it all"""


class PartialRolloutAgentLoopWorker(ObservedAgentLoopWorker):
    """The actor around a ``ClaimLoop``: forwards its verbs, and runs claimed samples in verl's agent loops."""

    _serving: asyncio.Task[None] | None = None
    """the ``ClaimLoop``'s"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tools = journaled(self.tools, self.config.partial_rollout.failures.tool_timeout_s)
        self._connected: ClaimLoop | None = None
        assert isinstance(self.llm_client, PartialRolloutLLMClient)
        self.llm_client.use_tokenizer(self.tokenizer)

    def connect(self, name: str, manager: Any, capacity: int, replicas: ReplicaChoice) -> None:
        """Claim from ``manager`` as ``name``, with ``capacity`` slots, and run on ``replicas``; called first."""
        self.use_replicas(replicas)
        settings = self.config.partial_rollout
        self._connected = ClaimLoop(
            name,
            manager,
            capacity,
            self._run_granted,
            grant_s=settings.deadlines.grant_s,
            sample_s=settings.failures.sample_timeout_s,
            rounds_end=settings.placement == Placement.COLOCATED,
        )

    def use_replicas(self, replicas: ReplicaChoice) -> None:
        """From here on the replicas are these."""
        assert isinstance(self.llm_client, PartialRolloutLLMClient)
        self.llm_client.use_replicas(replicas)

    @property
    def _claims(self) -> ClaimLoop:
        if self._connected is None:
            raise RuntimeError("the agent-loop worker is not connected to a manager")
        return self._connected

    async def serve(self) -> None:
        """``ClaimLoop.serve``; a driver that lost its connection asks again, and awaits the same."""
        self._serving = self._serving or asyncio.create_task(self._claims.serve())
        await asyncio.shield(self._serving)

    def open_round(self) -> None:
        """``ClaimLoop.open_round``."""
        self._claims.open_round()

    def close_round(self) -> None:
        """``ClaimLoop.close_round``."""
        self._claims.close_round()

    async def flush(self) -> None:
        """``ClaimLoop.flush``."""
        await self._claims.flush()

    async def _run_granted(self, grant: Grant) -> SampleOutput:
        kwargs = self._kwargs({**grant.row, "uid": grant.group_uid})
        output = await self._run_agent_loop(self._sampling_params(), trajectory_of(grant.row), trace=False, **kwargs)
        if self.config.trainer.save_freq > 0:
            check_saveable(grant.sample_id, output)
        return output

    async def _probe_sample(self, row: dict[str, Any], **sampling_params: Any) -> None:
        LIVE_SAMPLE.set(LiveSample(f"probe-{uuid4().hex}", keeper=ProbeSlots(), priority=0))
        with contextlib.suppress(ProbeEndedError):
            await super()._probe_sample(row, **sampling_params)

    async def _agent_loop_postprocess(self, output: AgentLoopOutput, validate: bool, **kwargs: Any) -> Any:
        sample = LIVE_SAMPLE.get()
        if sample is None:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)
        if output.multi_modal_data:
            raise ValueError(
                f"sample {sample.id} has multi-modal data ({', '.join(output.multi_modal_data)}): "
                f"partial rollout trains text only; set partial_rollout.enable=False"
            )
        late = asyncio.get_running_loop().call_later(_FREES_SLOT_AFTER_S, sample.keeper.leave, sample)
        try:
            with sample.clock.stopped():
                await self._compute_score([output], kwargs)
        finally:
            late.cancel()
        return sample_output(sample, output)
