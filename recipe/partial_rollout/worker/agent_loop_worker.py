"""verl's agent-loop worker in both arms: noPR's with an account of its calls, and PR's, which runs what it claims."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from functools import partial
from typing import Any
from uuid import uuid4

from hydra.utils import get_class, instantiate
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopOutput,
    AgentLoopWorker,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)
from verl.experimental.reward_loop import RewardLoopWorker
from verl.protocol import DataProto
from verl.utils.rollout_trace import rollout_trace_attr

from recipe.partial_rollout.config.choices import Placement
from recipe.partial_rollout.manager.codec import check_saveable
from recipe.partial_rollout.manager.types import Grant, SampleOutput
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.waits import one_line
from recipe.partial_rollout.worker.claim_loop import ClaimLoop
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample, ProbeEndedError, ProbeSlots
from recipe.partial_rollout.worker.llm_client import ObservedLLMClient, PartialRolloutLLMClient
from recipe.partial_rollout.worker.replica_choice import ReplicaChoice
from recipe.partial_rollout.worker.rewards import Places, RewardWorkers, reward_places
from recipe.partial_rollout.worker.tool_journal import journaled, of_sample
from recipe.partial_rollout.worker.turn_alignment import sample_output

_WARM_UP_TOKENS = 8


class RewardError(RuntimeError):
    """The reward function failed or did not answer."""


class ObservedAgentLoopWorker(AgentLoopWorker):
    """verl's worker, with a deadline on the reward function and an account of its engine calls."""

    llm_client: ObservedLLMClient

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.partial_rollout.reward_in_worker:
            self.reward_loop_worker_handles = [_LocalRewardHandle(RewardLoopWorker(self.config))]  # type: ignore[assignment]
        elif self.reward_loop_worker_handles:
            self.reward_loop_worker_handles = [RewardWorkers(self.reward_loop_worker_handles)]  # type: ignore[assignment]
        self._rewards = Places(reward_places(self.config))
        self._probe_over = asyncio.Event()

    def take_calls(self) -> list[EngineCall]:
        """Engine calls that ended since this was last called."""
        return self.llm_client.take_calls()

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **kwargs,
    ) -> Any:
        """As verl's, with ``_loop_client``, and without composing the whole configuration again for every sample."""
        registered = _agent_loop_registry.get(agent_name)
        if registered is None:
            raise ValueError(f"agent loop {agent_name!r} is not registered; known: {', '.join(_agent_loop_registry)}")
        make = (
            get_class(registered["_target_"]) if set(registered) == {"_target_"} else partial(instantiate, registered)
        )
        with rollout_trace_attr(
            step=trajectory["step"],
            sample_index=trajectory["sample_index"],
            rollout_n=trajectory["rollout_n"],
            validate=trajectory["validate"],
            name="agent_loop",
            trace=trace,
        ):
            agent_loop = make(
                trainer_config=DictConfigWrap(config=self.config),
                server_manager=self._loop_client(),
                tokenizer=self.tokenizer,
                processor=self.processor,
                hf_model_type=self.hf_model_type,
                dataset_cls=self.dataset_cls,
                data_config=DictConfigWrap(self.config.data),
                tools=ToolListWrap(self._loop_tools()),
            )
            output = await agent_loop.run(sampling_params, **kwargs)
            return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    def _loop_client(self) -> Any:
        """What the agent loop that is about to run generates with."""
        return self.llm_client

    def _loop_tools(self) -> list[Any]:
        """The tools that it calls."""
        return self.tools

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict) -> None:
        deadline_s = self.config.partial_rollout.deadlines.reward_s
        async with self._rewards.one():
            try:
                await asyncio.wait_for(super()._compute_score(outputs, kwargs), deadline_s)
            except TimeoutError as error:
                raise RewardError(
                    f"reward function gave no score for prompt {kwargs.get('uid')} within {deadline_s:g} s "
                    f"(partial_rollout.deadlines.reward_s)"
                ) from error
            except Exception as error:
                raise RewardError(f"reward function failed on prompt {kwargs.get('uid')}: {one_line(error)}") from error

    async def warm_up(self, rows: list[dict[str, Any]], concurrency: int) -> None:
        """Decode ``concurrency`` samples of a few tokens, because engines compile in their first steps."""
        rows = [rows[index % len(rows)] for index in range(concurrency)]
        await asyncio.gather(*[self._probe_sample(row, max_tokens=_WARM_UP_TOKENS) for row in rows])

    async def probe(self, rows: list[dict[str, Any]], concurrency: int) -> None:
        """Keep ``concurrency`` samples running through the whole path until ``end_probe``."""
        self._probe_over.clear()

        async def keep_one(index: int) -> None:
            while not self._probe_over.is_set():
                await self._probe_sample(rows[index % len(rows)])
                index += concurrency

        await asyncio.gather(*[keep_one(index) for index in range(concurrency)])

    async def _probe_sample(self, row: dict[str, Any], **sampling_params: Any) -> None:
        sampling_params, kwargs = {**self._sampling_params(), **sampling_params}, self._kwargs(row)
        if self.tools:
            # A sample in a tool keeps no engine full, and the probe could not end before the tool does.
            kwargs["agent_name"] = "single_turn_agent"
        await self._run_agent_loop(sampling_params, trajectory_of(row), trace=False, **kwargs)

    def end_probe(self) -> None:
        """Start no more probe samples."""
        self._probe_over.set()

    def _sampling_params(self) -> dict[str, Any]:
        config = self.rollout_config
        return {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "repetition_penalty": 1.0,
            "logprobs": config.calculate_log_probs,
        }

    def _kwargs(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"agent_name": self.rollout_config.agent.default_agent_loop, **row}


def trajectory_of(row: dict[str, Any]) -> dict[str, Any]:
    """What verl's tracing needs to know about a sample of dataset row ``row``."""
    return {"step": -1, "sample_index": row.get("index", 0), "rollout_n": 0, "validate": False}


class _LocalRewardHandle:
    """verl's reward worker in this process, called like an actor handle."""

    def __init__(self, worker: RewardLoopWorker) -> None:
        self.compute_score = self
        self._worker = worker

    def remote(self, data: DataProto) -> Awaitable[dict]:
        return self._worker.compute_score(data)


class PartialRolloutAgentLoopWorker(ObservedAgentLoopWorker):
    """The actor around a ``ClaimLoop``: forwards its verbs, and runs claimed samples in verl's agent loops."""

    _serving: asyncio.Task[None] | None = None
    """the ``ClaimLoop``'s"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ours = self.config.partial_rollout
        self.tools = journaled(self.tools, ours.failures.tool_timeout_s, ours.tools)
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
            release_after_s=settings.tools.release_after_s,
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

    def _loop_client(self) -> Any:
        sample = LIVE_SAMPLE.get()
        assert isinstance(self.llm_client, PartialRolloutLLMClient)
        return self.llm_client if sample is None else self.llm_client.of(sample)

    def _loop_tools(self) -> list[Any]:
        sample = LIVE_SAMPLE.get()
        return self.tools if sample is None else of_sample(self.tools, sample)

    async def _agent_loop_postprocess(self, output: AgentLoopOutput, validate: bool, **kwargs: Any) -> Any:
        sample = LIVE_SAMPLE.get()
        if sample is None:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)
        await sample.end()
        if output.multi_modal_data:
            raise ValueError(
                f"sample {sample.id} has multi-modal data ({', '.join(output.multi_modal_data)}): "
                f"partial rollout trains text only; set partial_rollout.enable=False"
            )
        with sample.clock.stopped():
            await self._compute_score([output], kwargs)
        return sample_output(sample, output)
