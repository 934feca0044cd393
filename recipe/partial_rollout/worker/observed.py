"""Instrumented agent-loop worker and engine client. noPR trains with them; PR validates with them and subclasses them.

A sample fails if its agent loop raises, if a replica refuses its request, if it does not fit a batch, or if it has no
score. It is retried. Then noPR's training ends with the error, and a validation leaves the sample out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from hydra.utils import get_class, instantiate
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
from verl.utils.tokenizer.tokenizer import normalize_token_ids
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout.config.settings import FilterSettings
from recipe.partial_rollout.manager.policies import (
    FailureVerdict,
    excess_of,
    missing,
    retry_delay_s,
    verdict_on,
)
from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.waits import ReplicaError, ToldError, answer_of, means_death, one_line
from recipe.partial_rollout.worker.live_sample import Place, Request, SampleTimeoutError
from recipe.partial_rollout.worker.rewards import (
    REWARD_INFO,
    RewardError,
    RewardWorkers,
    checked,
    paces_rewards,
    parts_of_reward,
    renamed,
    reward_of,
    reward_places,
)

ABORTED = ("aborted", "abort")
_ID_DIGITS = 12
"""digits of verl's request ids, which have 32, that tell the samples of a run apart in its trace"""
REQUEST: ContextVar[Request] = ContextVar("request")
"""the request that verl's ``generate`` makes at this moment; it notes where it goes"""
_AGENT_LOOP: ContextVar[str] = ContextVar("agent_loop", default="of a sample")
"""name of the agent loop that runs"""

Play = Callable[[Any, list[Any]], Coroutine[Any, Any, AgentLoopOutput]]
"""a run of an agent loop whose parameters and row are given: takes the client and the tools"""

logger = logging.getLogger(__name__)


def version_of(output: TokenOutput) -> int:
    """Return the policy version that made the last token of ``output``; -1 if the replica did not say."""
    version = output.extra_fields.get("global_steps")
    return -1 if version is None else int(version)


class ObservedLLMClient(LLMServerClient):
    """verl's client; remembers what each engine call cost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls: list[EngineCall] = []

    @classmethod
    def over(cls, client: LLMServerClient) -> Self:
        """Make a client on the connection of ``client``."""
        return cls(config=client.config, load_balancer_handle=client._load_balancer)

    def take_calls(self) -> list[EngineCall]:
        """Return the calls that ended since this was last called."""
        calls, self._calls = self._calls, []
        return calls

    async def _acquire_server(self, request_id: str, **extra: Any):
        request = REQUEST.get()
        request.address, server = await super()._acquire_server(request_id, **extra)
        return request.address, server

    async def generate(  # type: ignore[override]
        self, request_id: str, *, request: Request | None = None, **kwargs: Any
    ) -> TokenOutput:
        """Call ``LLMServerClient.generate``, and note what it cost.

        Raises:
            ReplicaError: the replica died or refused the request; the message names it.
        """
        params = kwargs.get("sampling_params", {})
        if not params.get("stop"):
            # Tokens in, tokens out: no one reads the text that the server would otherwise decode token by token.
            kwargs["sampling_params"] = {"detokenize": False, **params}
        request, start = request or Request(Place()), time.time()
        output = await self._asked(request_id, request, kwargs)
        # A call that was aborted in the engine's queue prefilled nothing.
        prefilled = request.resumed_tokens if output.token_ids else 0
        self._calls.append(
            EngineCall(
                replica=request.address,
                start=start,
                end=time.time(),
                tokens=len(output.token_ids),
                version=version_of(output),
                resumed_tokens=max(0, prefilled - (output.extra_fields.get("num_cached_tokens") or 0)),
                context_tokens=len(normalize_token_ids(kwargs["prompt_ids"])),
                queued_s=float(output.extra_fields.pop("queued_s", None) or 0.0),
                # A sample of noPR has no other name than the request id that its loop keeps for all its turns, of any type;
                # a "#" is for PR's.
                sample=request.sample.id if request.sample else str(request_id)[:_ID_DIGITS].replace("#", "-"),
                interrupted=output.stop_reason in ABORTED,
                earlier_tokens=prefilled if request.begins else 0,
                waited_s=round(request.waited_s, 3),
            )
        )
        return output

    async def _asked(self, request_id: str, request: Request, kwargs: dict[str, Any]) -> TokenOutput:
        """Return verl's answer."""
        token, verls = REQUEST.set(request), super().generate
        try:
            # A call that is made again goes to vLLM under an id of its own.
            return await answer_of(lambda: verls(request_id=request_id, **kwargs))
        except Exception as error:
            name, dead = request.address or "(none acquired)", means_death(error)
            did = "failed on" if dead else "refused"
            raise ReplicaError(
                f"vLLM replica {name} {did} request {request_id}: {one_line(error)}", dead=dead
            ) from error
        finally:
            REQUEST.reset(token)


class OverlongError(ValueError):
    """An agent loop returned more than a batch holds."""


class ObservedAgentLoopWorker(AgentLoopWorker):
    """verl's worker; it bounds and retries reward calls, retries samples, and notes its engine calls."""

    llm_client: ObservedLLMClient
    _filter: FilterSettings | None = None
    """judges groups by what a reward says, if ``algorithm.filter_groups`` asks for it"""
    _parts: tuple[str, ...] = ()
    """see ``parts_of_reward``"""
    _paces = False
    """see ``paces_rewards``"""

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
        self._paces = paces_rewards(self.config)

    def take_calls(self) -> list[EngineCall]:
        """Return the engine calls that ended since this was last called."""
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
        """Do as verl's; an agent loop that fails is run again."""
        # Samples of a prompt share their row, and a loop or its reward may write into it.
        kwargs = deepcopy(kwargs)
        play = partial(self._play, self._maker(agent_name), sampling_params, kwargs)
        with rollout_trace_attr(
            step=trajectory["step"],
            sample_index=trajectory["sample_index"],
            rollout_n=trajectory["rollout_n"],
            validate=trajectory["validate"],
            name="agent_loop",
            trace=trace,
        ):
            output = await self._tried(play, trajectory)
            return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    def _maker(self, agent_name: str) -> Callable[..., Any]:
        """Return what makes the agent loop of this name, without composing the whole configuration for every sample."""
        _AGENT_LOOP.set(agent_name)
        registered = _agent_loop_registry.get(agent_name)
        if registered is None:
            raise ValueError(f"agent loop {agent_name!r} is not registered; known: {', '.join(_agent_loop_registry)}")
        return (
            get_class(registered["_target_"]) if set(registered) == {"_target_"} else partial(instantiate, registered)
        )

    async def _play(
        self, make: Callable[..., Any], params: dict[str, Any], row: dict[str, Any], client: Any, tools: list[Any]
    ) -> AgentLoopOutput:
        """Run the agent loop that ``make`` makes, which generates with ``client`` and calls ``tools``."""
        agent_loop = make(
            trainer_config=DictConfigWrap(config=self.config),
            server_manager=client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            hf_model_type=self.hf_model_type,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            tools=ToolListWrap(tools),
        )
        output = await agent_loop.run(dict(params), **row)
        if not isinstance(output, AgentLoopOutput):
            what = f"a list of {len(output)} outputs" if isinstance(output, list) else type(output).__name__
            raise TypeError(
                f"agent loop {_AGENT_LOOP.get()} returned {what}: return the AgentLoopOutput that is trained"
            )
        return output

    async def _attempt(self, play: Play, trajectory: dict[str, Any]) -> AgentLoopOutput:
        """Run the agent loop once."""
        return await play(self.llm_client, self.tools)

    async def _tried(self, play: Play, trajectory: dict[str, Any]) -> AgentLoopOutput:
        """Run the agent loop, again if it fails. A dead replica and a sample's deadline are not retried.

        Returns a masked output if a validation's sample has no retries left; noPR's training ends with the error.
        """
        for times in itertools.count(1):
            try:
                return await self._attempt(play, trajectory)
            except (Exception, asyncio.CancelledError) as error:
                verdict = verdict_on(times, self.config.partial_rollout.failures)
                ended = asyncio.current_task().cancelling()  # type: ignore[union-attr]
                hopeless = isinstance(error, SampleTimeoutError) or (isinstance(error, ReplicaError) and error.dead)
                fatal = verdict is not FailureVerdict.RETRY and not trajectory["validate"]
                if ended or hopeless or fatal or verdict is FailureVerdict.RAISE:
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

    async def _agent_loop_postprocess(self, output: AgentLoopOutput, validate: bool, **kwargs: Any) -> Any:
        """Do as verl's, in noPR and validation; a validation leaves out a sample that fits no batch, or has no score."""
        scored_here = output.reward_score is not None or self.reward_loop_worker_handles is not None
        if "sample_error" not in (output.extra_fields.get(REWARD_INFO) or {}):
            try:
                await self._score(output, kwargs, validate=validate)
            except (OverlongError, RewardError) as error:
                if not validate or self.config.partial_rollout.failures.sample_retries is None:
                    raise
                place = f" ({ToldError.of(error.__cause__).place})" if error.__cause__ else ""
                output = self._masked(output, one_line(error) + place)
        if "sample_error" in (output.extra_fields.get(REWARD_INFO) or {}) and scored_here:
            # No mean of a validation counts it (``training/reward_info.py``).
            output.reward_score = math.nan
        return await super()._agent_loop_postprocess(output, validate, **kwargs)

    def _masked(self, output: AgentLoopOutput, error: str) -> AgentLoopOutput:
        """Return ``output``, cut to what a batch holds, as a failed sample's, which is not trained."""
        rollout = self.rollout_config
        output.prompt_ids = output.prompt_ids[: rollout.prompt_length]
        output.response_ids = output.response_ids[: rollout.response_length]
        output.response_mask = [0] * len(output.response_ids)
        if output.response_logprobs is not None:
            output.response_logprobs = output.response_logprobs[: rollout.response_length]
        output.extra_fields[REWARD_INFO] = {"sample_error": error}
        return output

    async def _score(
        self,
        output: AgentLoopOutput,
        kwargs: dict,
        *,
        validate: bool = False,
        rescored: Callable[[RewardError], None] = lambda error: None,
    ) -> None:
        """Score ``output``. Where that fails it is scored again, as often as a sample is retried, without its agent loop.

        Args:
            rescored: gets each error after which it is scored again.

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
        output.extra_fields = renamed(output.extra_fields, "loop")
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
                rescored(error)
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
        deadline_s = None if self._paces else self.config.partial_rollout.deadlines.reward_s
        async with self._rewards:
            # The deadline of a call starts when it has its place.
            await reward_of(super()._compute_score(outputs, kwargs), kwargs.get("uid"), deadline_s)

    def _postprocess(self, inputs: list[Any], *args: Any, **kwargs: Any) -> DataProto:
        """Do as verl's, with what rewards say in one column of dictionaries: samples may have different keys."""
        if any(each.response_logprobs is None for each in inputs):
            # verl takes those of all, or of none.
            for each in inputs:
                each.response_logprobs = None
        infos = np.empty(len(inputs), dtype=object)
        infos[:] = [each.extra_fields.pop(REWARD_INFO, None) or {} for each in inputs]
        data = super()._postprocess(inputs, *args, **kwargs)
        data.non_tensor_batch[REWARD_INFO] = infos
        return data
