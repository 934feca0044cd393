"""Instrumented agent-loop worker and engine client. noPR trains with them; PR validates with them and subclasses them.

A sample fails if its agent loop raises, if a replica refuses its request, if its output does not fit a batch, or if it
has no valid score. The agent loop and the reward call are retried up to ``failures.sample_retries`` times. After that,
noPR's training ends with the error, and a validation leaves the sample out (with ``sample_retries=null`` it ends, too).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import numpy as np
from hydra.utils import get_object, instantiate
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
    SAMPLE_ERROR,
    FailureVerdict,
    missing,
    retry_delay_s,
    verdict_on,
)
from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.waits import ErrorText, InfraError, answer_of, is_cancelled, means_death, one_line
from recipe.partial_rollout.worker.live_sample import ReplicaAffinity, Request
from recipe.partial_rollout.worker.loop_rows import ROW, misfit, placeholders, rows_of, unified
from recipe.partial_rollout.worker.rewards import (
    REWARD_INFO,
    RewardError,
    RewardWorkers,
    check_limited,
    checked,
    gdpo_keys,
    renamed,
    reward_of,
    reward_permits,
)
from verl_ext.contained import contain, contained

ABORTED = ("aborted", "abort")
_ID_DIGITS = 12
"""noPR: leading digits of verl's request id (32 hex digits) that name a sample in the records of engine calls"""
# A context variable: many calls run at once on one client, and verl's ``generate`` has no parameter for the request.
REQUEST: ContextVar[Request] = ContextVar("request")
"""the request that the current task makes through verl's ``generate``; ``_acquire_server`` adds the replica to it"""
T = TypeVar("T")
AgentLoopCall = Callable[[Any, list[Any]], Coroutine[Any, Any, list[AgentLoopOutput]]]
"""an agent loop with its parameters and row: call it with a client and the tools to run it"""

logger = logging.getLogger(__name__)


def version_of(output: TokenOutput) -> int:
    """Return the policy version that made the last token of ``output``; -1 if the replica did not say."""
    version = output.extra_fields.get("global_steps")
    return -1 if version is None else int(version)


class ObservedLLMClient(LLMServerClient):
    """verl's client; records an ``EngineCall`` (times, tokens, version, replica) for each call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls: list[EngineCall] = []

    @classmethod
    def over(cls, client: LLMServerClient) -> Self:
        """Make a client that uses the config and the load balancer of ``client``."""
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
        """Call ``LLMServerClient.generate``, and record the call as an ``EngineCall``.

        Raises:
            InfraError: the replica died, and the message names it; or no replica is left.
            RuntimeError: the replica refused the request.
        """
        params = kwargs.get("sampling_params", {})
        if not params.get("stop"):
            # Tokens in, tokens out: no one reads the text that the server would otherwise decode token by token.
            kwargs["sampling_params"] = {"detokenize": False, **params}
        request, start = request or Request(ReplicaAffinity()), time.time()
        token, verls = REQUEST.set(request), super().generate
        try:
            # A call that is made again goes to vLLM under an id of its own.
            output = await answer_of(lambda: verls(request_id=request_id, **kwargs))
        except InfraError:
            raise
        except Exception as error:
            kind, did = (InfraError, "failed on") if means_death(error) else (RuntimeError, "refused")
            name = request.address or "(none acquired)"
            raise kind(f"vLLM replica {name} {did} request {request_id}: {one_line(error)}") from error
        finally:
            REQUEST.reset(token)
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
                waited_s=round(request.waited_s, 3),
            )
        )
        return output


class ObservedAgentLoopWorker(AgentLoopWorker):
    """verl's worker; it limits and retries reward calls, retries agent loops, and records its engine calls."""

    llm_client: ObservedLLMClient
    vocabulary: int
    """number of token ids that the model knows"""
    _filter: FilterSettings | None = None
    """PR: settings of dynamic sampling, whose metric each score must have; None without ``algorithm.filter_groups``"""
    _limited = False
    """whether verl's rate_limited manager calls the reward function"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vocabulary = self.model_config.hf_config.get_text_config().vocab_size
        if self.config.partial_rollout.reward_in_worker:
            # verl's reward worker in this process, called like an actor handle.
            local = SimpleNamespace(remote=RewardLoopWorker(self.config).compute_score)
            self.reward_loop_worker_handles = [SimpleNamespace(compute_score=local)]  # type: ignore[assignment]
        elif self.reward_loop_worker_handles:
            self.reward_loop_worker_handles = [RewardWorkers(self.reward_loop_worker_handles, self.config)]  # type: ignore[assignment]
        most = reward_permits(self.config)
        self._rewards = contextlib.nullcontext() if most is None else asyncio.Semaphore(most)
        self._parts = gdpo_keys(self.config.algorithm)
        # This manager of verl's queues the calls itself, and gives each a deadline of its own (``reward.timeout``).
        manager = self.config.reward.reward_manager
        self._limited = (manager.name, manager.source) == ("rate_limited", "register")
        self._reward_s = None if self._limited else self.config.partial_rollout.deadlines.reward_s

    def take_calls(self) -> list[EngineCall]:
        """Return the engine calls that ended since this was last called."""
        return self.llm_client.take_calls()

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Generate as verl's worker does. A loop, tool or reward that exits does not end the worker."""
        contain(asyncio.get_running_loop())
        return await super().generate_sequences(batch)

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **kwargs,
    ) -> Any:
        """Run a sample as verl's worker does, but retry an agent loop or a reward that fails."""
        # Samples of a prompt share their row, and a loop or its reward may write into it.
        kwargs = deepcopy(kwargs)
        correction = self.config.algorithm.rollout_correction or {}
        reads = any(correction.get(key) for key in ("rollout_is", "rollout_rs"))
        needs = reads and not trajectory["validate"]
        run_loop = partial(self._run_loop, self._maker(agent_name), sampling_params, kwargs, needs_log_probs=needs)
        with rollout_trace_attr(
            step=trajectory["step"],
            sample_index=trajectory["sample_index"],
            rollout_n=trajectory["rollout_n"],
            validate=trajectory["validate"],
            name="agent_loop",
            trace=trace,
        ):
            return await self._rows(run_loop, trajectory, kwargs)

    def _maker(self, agent_name: str) -> Callable[..., Any]:
        """Return the factory of agent loop ``agent_name``.

        If the registry's entry has only ``_target_``, the factory is what it names: hydra's ``instantiate`` would
        process the whole configuration for each sample.
        """
        registered = _agent_loop_registry.get(agent_name)
        if registered is None:
            raise ValueError(f"agent loop {agent_name!r} is not registered; known: {', '.join(_agent_loop_registry)}")
        return (
            get_object(registered["_target_"]) if set(registered) == {"_target_"} else partial(instantiate, registered)
        )

    async def _run_loop(
        self,
        make: Callable[..., Any],
        params: dict[str, Any],
        row: dict[str, Any],
        client: Any,
        tools: list[Any],
        *,
        needs_log_probs: bool = False,
    ) -> list[AgentLoopOutput]:
        """Run the agent loop that ``make`` makes, which generates with ``client`` and calls ``tools``; returns its rows.

        Args:
            needs_log_probs: whether a row that trains tokens must have log-probs. PR's are the engine's own.
        """
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
        returned = await contained(agent_loop.run(dict(params), **row))
        rows = rows_of(returned, several=self.config.trainer.use_v1)
        needs = {"media": placeholders(self.processor), "needs_log_probs": needs_log_probs}
        for each in rows:
            if what := misfit(each, self.vocabulary, self.rollout_config, **needs):
                raise ValueError(f"the agent loop of prompt {row.get('uid')} returned {what}")
            if not each.response_logprobs:
                # verl would pad an empty list with zeros, which are log-probs; a row that trains nothing may have them.
                each.response_logprobs = [0.0] * len(each.response_ids) if needs_log_probs else None
        return rows

    async def _attempt(self, run_loop: AgentLoopCall, trajectory: dict[str, Any]) -> list[AgentLoopOutput]:
        """Run the agent loop once."""
        return await run_loop(self.llm_client, self.tools)

    async def _rows(self, run_loop: AgentLoopCall, trajectory: dict[str, Any], row: dict[str, Any]) -> list[Any]:
        """Run the agent loop, score its outputs and make rows of them. The loop, and then the reward call, are retried.

        If the sample fails for good, raise its error. In a validation return one empty row instead, unless
        ``sample_retries=null``.
        """
        validate = trajectory["validate"]
        try:
            outputs = await self._retried(lambda: self._attempt(run_loop, trajectory))
            await self._score(outputs, row, validate=validate)
            # A validation reads the last row alone, as verl's v1 does.
            shown = outputs[-1:] if validate else outputs
            return [await self._agent_loop_postprocess(each, validate, **row) for each in shown]
        except (Exception, asyncio.CancelledError) as error:
            masks = validate and self.config.partial_rollout.failures.sample_retries is not None
            if not masks or isinstance(error, InfraError) or is_cancelled():
                raise
            text = ErrorText.from_error(error)
        empty = AgentLoopOutput(
            # One token, because a row without any has no last token to carry a score.
            prompt_ids=[0],
            response_ids=[0],
            response_mask=[0],
            # No mean of a validation counts it (``training/reward_info.py``). A colocated model scores later.
            reward_score=None if self.reward_loop_worker_handles is None else math.nan,
            metrics=AgentLoopMetrics(),
            extra_fields={SAMPLE_ERROR: f"{text.line} ({text.where})"},
        )
        return [await self._agent_loop_postprocess(empty, validate, **row)]

    async def _retried(
        self, attempt: Callable[[], Awaitable[T]], on_retry: Callable[[Any], None] = lambda error: None
    ) -> T:
        """Call ``attempt`` until it succeeds, at most as often as a sample is retried, and return its result.

        Args:
            on_retry: called with each error after which ``attempt`` is called again.
        """
        for times in itertools.count(1):
            try:
                return await attempt()
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, RewardError):
                    error.times = times
                again = verdict_on(times, self.config.partial_rollout.failures) is FailureVerdict.RETRY
                if not again or isinstance(error, InfraError) or is_cancelled():
                    raise
                logger.warning("an agent loop or reward call failed and is tried again: %s", one_line(error))
                on_retry(error)
            await asyncio.sleep(retry_delay_s(times))
        raise AssertionError("an attempt returns or raises")

    async def _score(
        self,
        outputs: list[AgentLoopOutput],
        row: dict[str, Any],
        *,
        validate: bool = False,
        on_rescore: Callable[[RewardError], None] = lambda error: None,
    ) -> None:
        """Score ``outputs`` of a sample, unless its agent loop has scored them. Retry a reward call that fails.

        As under verl's v1 the reward function is called once for all rows, and each row gets its score.

        Args:
            on_rescore: called with each error after which the reward is computed again.

        Raises:
            RewardError: there is no score that can be trained.
        """
        for output in outputs:
            # As verl's worker does: reward functions may read it.
            output.extra_fields["raw_prompt"] = row.get("raw_prompt")
        last = outputs[-1]
        if last.reward_score is not None:
            self._check_score(last, row, validate)
        else:
            await self._retried(lambda: self._ask_for_score(outputs, row, validate), on_rescore)
        for output in outputs[:-1]:
            output.reward_score = last.reward_score
            output.extra_fields[REWARD_INFO] = last.extra_fields.get(REWARD_INFO)
        for output in outputs:
            output.extra_fields = renamed(output.extra_fields, "loop")

    async def _ask_for_score(self, outputs: list[AgentLoopOutput], row: dict[str, Any], validate: bool) -> None:
        output = outputs[-1]
        output.reward_score = None
        async with self._rewards:
            # The deadline starts only now, when the call has a permit and runs.
            await reward_of(self._compute_score(outputs, row), row.get("uid"), self._reward_s)
        if self._limited:
            check_limited(row.get("uid"), output.extra_fields.get(REWARD_INFO) or {})
        # Without reward workers a score comes later, of a colocated reward model.
        if output.reward_score is not None or self.reward_loop_worker_handles is not None:
            self._check_score(output, row, validate)

    def _check_score(self, output: AgentLoopOutput, row: dict[str, Any], validate: bool) -> None:
        """Raise ``RewardError`` if the score is not a finite number.

        In training also raise it if the reward lacks another number that the run needs: one of
        ``algorithm.gdpo_reward_keys``, or the metric of dynamic sampling.
        """
        score, info, prompt = output.reward_score, output.extra_fields.get(REWARD_INFO) or {}, row.get("uid")
        output.reward_score = checked(score, prompt, info, () if validate else self._parts)
        # Groups of a validation are not filtered.
        if self._filter and not validate and (lacks := missing(self._filter.metric, score, info)):
            raise RewardError(f"reward of prompt {prompt}: {lacks}")

    def _postprocess(
        self,
        inputs: list[list[Any]],
        input_non_tensor_batch: dict[str, Any] | None = None,
        *,
        validate: bool = False,
    ) -> DataProto:
        """Make a batch of all rows of the samples as verl's worker does, with the columns that every worker's batch has.

        The rewards' extra information and the loops' own fields have a column of dictionaries each (``spread_infos``).

        Args:
            inputs: rows of each sample; two samples may have different fields.
            input_non_tensor_batch: columns with one entry a sample.
        """
        rows = [row for sample in inputs for row in sample]
        owners = np.repeat(np.arange(len(inputs)), [len(sample) for sample in inputs])
        columns = {key: column[owners] for key, column in (input_non_tensor_batch or {}).items()}
        own = unified(rows, validate)
        data = super()._postprocess(rows, columns, validate=validate)
        data.non_tensor_batch |= own
        if self.config.trainer.use_v1:
            data.non_tensor_batch[ROW] = np.concatenate([np.arange(len(sample)) for sample in inputs])
        return data
