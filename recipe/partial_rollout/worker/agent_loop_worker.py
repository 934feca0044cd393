"""verl's agent-loop worker in both arms: noPR's with an account of its calls, and PR's, which runs what it claims."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from hydra.utils import get_class, instantiate
from ray import cloudpickle
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)
from verl.experimental.reward_loop import RewardLoopWorker
from verl.protocol import DataProto
from verl.utils.rollout_trace import rollout_trace_attr

from recipe.partial_rollout.config.settings import FilterSettings, Placement
from recipe.partial_rollout.manager import garbage
from recipe.partial_rollout.manager.codec import check_saveable
from recipe.partial_rollout.manager.policies import (
    FailureVerdict,
    excess_of,
    missing,
    retry_delay_s,
    verdict_on,
)
from recipe.partial_rollout.manager.types import Grant, SampleOutput
from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.waits import ReplicaError, ToldError, one_line
from recipe.partial_rollout.worker.claim_loop import ClaimLoop
from recipe.partial_rollout.worker.live_sample import (
    LIVE_SAMPLE,
    SampleClock,
    SampleTimeoutError,
)
from recipe.partial_rollout.worker.llm_client import (
    ObservedLLMClient,
    PartialRolloutLLMClient,
    ReplicaChoice,
    SampleClient,
)
from recipe.partial_rollout.worker.rewards import (
    REWARD_INFO,
    RewardError,
    RewardWorkers,
    checked,
    parts_of_reward,
    reward_of,
    reward_places,
)
from recipe.partial_rollout.worker.tool_journal import journaled, of_sample
from recipe.partial_rollout.worker.turn_alignment import sample_output

_AGENT_LOOP: ContextVar[str] = ContextVar("agent_loop", default="of a sample")
"""name of the agent loop that runs"""

_THREADS = 1024
"""of the event loop, made as they are needed: samples that are carried keep theirs, and the others need some, too"""

logger = logging.getLogger(__name__)


class OverlongError(ValueError):
    """An agent loop returned more than a batch holds."""


def _require_one(output: Any) -> None:
    """Refuse what verl's trainer cannot train."""
    if not isinstance(output, AgentLoopOutput):
        what = f"a list of {len(output)} outputs" if isinstance(output, list) else type(output).__name__
        raise TypeError(f"agent loop {_AGENT_LOOP.get()} returned {what}: return the AgentLoopOutput that is trained")


class ObservedAgentLoopWorker(AgentLoopWorker):
    """verl's worker, with a deadline on the reward function and an account of its engine calls."""

    llm_client: ObservedLLMClient
    _filter: FilterSettings | None = None
    """judges groups by what a reward says, if ``algorithm.filter_groups`` asks for it"""
    _parts: tuple[str, ...] = ()
    """see ``parts_of_reward``"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.partial_rollout.reward_in_worker:
            # verl's reward worker in this process, called like an actor handle.
            local = SimpleNamespace(remote=RewardLoopWorker(self.config).compute_score)
            self.reward_loop_worker_handles = [SimpleNamespace(compute_score=local)]  # type: ignore[assignment]
        elif self.reward_loop_worker_handles:
            self.reward_loop_worker_handles = [RewardWorkers(self.reward_loop_worker_handles, self.config)]  # type: ignore[assignment]
        most = reward_places(self.config)
        self._rewards = contextlib.nullcontext() if most is None else asyncio.Semaphore(most)
        self._parts = parts_of_reward(self.config)

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
        _AGENT_LOOP.set(agent_name)
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
            output = await self._tried(make, sampling_params, trajectory, kwargs)
            return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    async def _tried(
        self,
        make: Callable[..., Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        kwargs: dict[str, Any],
    ) -> AgentLoopOutput:
        """What the agent loop returns: under noPR and in validation run again if it fails, and masked in the end.

        Of a training sample of PR the manager decides. A replica that fails ends the run, and so does a deadline.
        """
        for times in itertools.count(1):
            try:
                client = self._loop_client(trajectory)
                agent_loop = make(
                    trainer_config=DictConfigWrap(config=self.config),
                    server_manager=client,
                    tokenizer=self.tokenizer,
                    processor=self.processor,
                    hf_model_type=self.hf_model_type,
                    dataset_cls=self.dataset_cls,
                    data_config=DictConfigWrap(self.config.data),
                    tools=ToolListWrap(self._loop_tools()),
                )
                output = await self._output(agent_loop.run(dict(sampling_params), **kwargs), client)
                _require_one(output)
                return output
            except (Exception, asyncio.CancelledError) as error:
                verdict = verdict_on(times, self.config.partial_rollout.failures)
                ended = asyncio.current_task().cancelling() or LIVE_SAMPLE.get()  # type: ignore[union-attr]
                if ended or verdict is FailureVerdict.RAISE or isinstance(error, ReplicaError | SampleTimeoutError):
                    raise
                told = ToldError.of(error)
                said = f"{told.line} ({told.place})"
                logger.warning("an agent loop failed: %s (verdict: %s)", said, verdict)
                if verdict is FailureVerdict.MASK:
                    log_probs = [0.0] if self.rollout_config.calculate_log_probs else None
                    nothing = AgentLoopOutput(
                        prompt_ids=[0], response_ids=[0], response_mask=[0], response_logprobs=log_probs,
                        metrics=AgentLoopMetrics(),
                    )  # fmt: skip
                    return self._masked(nothing, said)
            await asyncio.sleep(retry_delay_s(times))
        raise AssertionError("the last verdict is to mask")

    def _loop_client(self, trajectory: dict[str, Any]) -> Any:
        """What the agent loop that is about to run generates with."""
        return self.llm_client

    def _loop_tools(self) -> list[Any]:
        """The tools that it calls."""
        return self.tools

    async def _output(self, run: Awaitable[Any], client: Any) -> Any:
        """What it returns."""
        return await run

    async def _agent_loop_postprocess(self, output: AgentLoopOutput, validate: bool, **kwargs: Any) -> Any:
        """As verl's, for noPR and validation: a sample that fits no batch, or has no score, ends alone."""
        scored_here = output.reward_score is not None or self.reward_loop_worker_handles is not None
        if "sample_error" not in (output.extra_fields.get(REWARD_INFO) or {}):
            try:
                await self._score(output, kwargs, validate=validate)
            except (OverlongError, RewardError) as error:
                if self.config.partial_rollout.failures.sample_retries is None:
                    raise
                place = f" ({ToldError.of(error.__cause__).place})" if error.__cause__ else ""
                output = self._masked(output, one_line(error) + place)
        if "sample_error" in (output.extra_fields.get(REWARD_INFO) or {}) and scored_here:
            # No mean of a validation counts it (``training/reward_info.py``).
            output.reward_score = math.nan if validate else 0.0
        return await super()._agent_loop_postprocess(output, validate, **kwargs)

    def _masked(self, output: AgentLoopOutput, error: str) -> AgentLoopOutput:
        """``output``, cut to what a batch holds, and not trained."""
        rollout = self.rollout_config
        output.prompt_ids = output.prompt_ids[: rollout.prompt_length]
        output.response_ids = output.response_ids[: rollout.response_length]
        output.response_mask = [0] * len(output.response_ids)
        if output.response_logprobs is not None:
            output.response_logprobs = output.response_logprobs[: rollout.response_length]
        output.extra_fields[REWARD_INFO] = {"sample_error": error}
        return output

    async def _score(self, output: AgentLoopOutput, kwargs: dict, *, validate: bool = False) -> None:
        """Score ``output``. Where that fails it is scored again, as often as a sample is retried, without its agent loop.

        Raises:
            OverlongError: it does not fit a batch.
            RewardError: there is no score that can be trained.
        """
        rollout = self.rollout_config
        sizes = len(output.prompt_ids), len(output.response_ids), rollout.prompt_length, rollout.response_length
        if excess := excess_of(*sizes):
            raise OverlongError(f"agent loop {_AGENT_LOOP.get()} returned {excess}")
        if "raw_prompt" in kwargs:
            # As verl's does: reward functions may read it.
            output.extra_fields["raw_prompt"] = kwargs["raw_prompt"]
        limits, by_loop = self.config.partial_rollout.failures, output.reward_score is not None
        for times in itertools.count(1):
            try:
                await self._compute_score([output], kwargs)
                # Without a score here one comes later, of a colocated reward model.
                if output.reward_score is not None or self.reward_loop_worker_handles is not None:
                    self._check_score(output, kwargs.get("uid"), validate)
                return
            except RewardError as error:
                error.times = times
                if by_loop or verdict_on(times, limits) is not FailureVerdict.RETRY:
                    raise
                logger.warning("%s; scored again", error)
                if (sample := LIVE_SAMPLE.get()) is not None:
                    sample.keeper.outbox.note_error(error)
            output.reward_score = None
            await asyncio.sleep(retry_delay_s(times))

    def _check_score(self, output: AgentLoopOutput, prompt: Any, validate: bool) -> None:
        """Refuse a score that cannot be trained, or that says too little for the algorithm."""
        score, info = output.reward_score, output.extra_fields.get(REWARD_INFO) or {}
        output.reward_score = checked(score, prompt, info, () if validate else self._parts)
        # Groups of a validation are not filtered.
        if self._filter and not validate and (lacks := missing(self._filter.metric, score, info)):
            raise RewardError(f"reward of prompt {prompt}: {lacks}")

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict) -> None:
        if outputs and outputs[-1].reward_score is not None:
            return
        deadline_s = self.config.partial_rollout.deadlines.reward_s
        async with self._rewards:
            # The deadline of a call starts when it has its place.
            await reward_of(super()._compute_score(outputs, kwargs), kwargs.get("uid"), deadline_s)

    def _postprocess(self, inputs: list[Any], *args: Any, **kwargs: Any) -> DataProto:
        """As verl's, with what rewards say in one column of dictionaries: samples may have different keys."""
        if any(each.response_logprobs is None for each in inputs):
            # verl takes those of all, or of none.
            for each in inputs:
                each.response_logprobs = None
        infos = np.empty(len(inputs), dtype=object)
        infos[:] = [each.extra_fields.pop(REWARD_INFO, None) or {} for each in inputs]
        data = super()._postprocess(inputs, *args, **kwargs)
        data.non_tensor_batch[REWARD_INFO] = infos
        return data

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


async def _contained(work: Awaitable[Any]) -> Any:
    """``work``'s result. To exit is an error: asyncio lets SystemExit out of its event loop, which then ends."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the agent loop or a tool of it raises {one_line(error)}") from error


def _task(loop: asyncio.AbstractEventLoop, work: Any, **how: Any) -> asyncio.Task[Any]:
    """A task of the worker's event loop."""
    task = asyncio.Task(_contained(work), loop=loop, **how)
    # Python warns of work that was never awaited: a task may be cancelled before it begins.
    task.add_done_callback(lambda _: work.close())
    return task


class PartialRolloutAgentLoopWorker(ObservedAgentLoopWorker):
    """Runs the samples that its ``ClaimLoop`` claims in verl's agent loops."""

    llm_client: PartialRolloutLLMClient  # type: ignore[assignment]
    _claims: ClaimLoop
    _serving: asyncio.Task[None] | None = None
    """the ``ClaimLoop``'s"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ours = self.config.partial_rollout
        self.tools = journaled(self.tools, ours.failures.tool_timeout_s)
        self._filter = FilterSettings.from_config(self.config)
        self.vocabulary = self.model_config.hf_config.get_text_config().vocab_size
        self.llm_client.tokenizer = self.tokenizer

    def connect(self, name: str, manager: Any, capacity: int, servers: dict[str, Any], place: float = 0.0) -> None:
        """Claim from ``manager`` as ``name``, with ``capacity`` slots; called first.

        Args:
            servers, place: of the replicas and of this worker (``ReplicaChoice``).
        """
        self.llm_client.replicas = ReplicaChoice(servers, place)
        settings = self.config.partial_rollout
        self._claims = ClaimLoop(
            name,
            manager,
            capacity,
            self._run_granted,
            sample_s=settings.failures.sample_timeout_s,
            release_after_s=settings.tools.release_after_s,
        )

    def use_replicas(self, servers: dict[str, Any]) -> None:
        """From here on the replicas are these, of which some were restarted; by address."""
        assert self.llm_client.replicas is not None
        self.llm_client.replicas.use(servers)

    async def serve(self) -> None:
        """``ClaimLoop.serve``; a driver that lost its connection asks again, and awaits the same."""
        if self._serving is None:
            home = asyncio.get_running_loop()
            home.set_task_factory(_task)
            home.set_default_executor(ThreadPoolExecutor(_THREADS))
            self._serving = asyncio.create_task(self._claims.serve())
        await asyncio.shield(self._serving)

    def open_round(self) -> None:
        """Engine calls are allowed from here on; a round of separate placement has no end for garbage to wait for."""
        if self.config.partial_rollout.placement == Placement.COLOCATED:
            garbage.hold()
        self._claims.open.set()

    def close_round(self) -> None:
        """Allow no new engine call; running ones end when their replica aborts them."""
        self._claims.open.clear()

    async def flush(self) -> None:
        """Wait until no engine call runs and the manager knows everything; then tell it that nothing is left to report."""
        await self._claims.reported()
        garbage.release()
        await self._claims.manager.flushed.remote(self._claims.name)

    async def _run_granted(self, grant: Grant) -> SampleOutput:
        # Samples of a group share their row, and a loop or its reward may write into it.
        kwargs = self._kwargs({**deepcopy(grant.row), "uid": grant.group_uid})
        trajectory = {"step": -1, "sample_index": grant.row.get("index", 0), "rollout_n": 0, "validate": False}
        output = await self._run_agent_loop(self._sampling_params(), trajectory, trace=False, **kwargs)
        if self.config.trainer.save_freq > 0:
            check_saveable(grant.sample_id, output)
            return output
        try:
            cloudpickle.dumps((output.extra_fields, output.reward_extra_info))  # type: ignore[attr-defined]
        except Exception as error:
            what = f"sample {grant.sample_id}: its agent loop or reward leaves what cannot be sent"
            raise TypeError(f"{what}: {error}") from error
        return output

    def _loop_client(self, trajectory: dict[str, Any]) -> SampleClient:
        sample = LIVE_SAMPLE.get()
        if sample is not None:
            return SampleClient(self.llm_client, sample, sample.clock)
        timeout_s = self.config.partial_rollout.failures.sample_timeout_s
        clock = SampleClock(f"validation row {trajectory['sample_index']}", timeout_s)
        return SampleClient(self.llm_client, None, clock)

    async def _output(self, run: Awaitable[Any], client: SampleClient) -> Any:
        if LIVE_SAMPLE.get() is not None:
            return await run
        try:
            return await client.clock.run(run)
        except SampleTimeoutError as error:
            held = f"{len(self._claims.samples)} training samples that began are carried meanwhile, with what they hold"
            raise SampleTimeoutError(f"{error}; it awaits {ToldError.of(error).place}; {held}") from error

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
            await self._score(output, kwargs)
        # The row has it.
        output.extra_fields.pop("raw_prompt", None)
        return sample_output(sample, output, self.vocabulary)
