"""Agent-loop worker of partial rollout: runs the samples that it claims, and matches the returned tokens to engine
calls.

A token can be trained (``response_mask`` 1) only if an engine call generated it at its place. Take a call with prompt P
and answer A. If the returned sequence (prompt and response) begins with P and shows the same images up to there, the
call made the tokens that follow P, as far as they equal A. A sample fails if no call made one of its trained tokens.

The order of the calls does not matter. So an agent loop may sample several candidates and keep one, ask a judge in
between, or mask a part of a turn. It may drop the end of a turn, as verl does with a token that both stops an answer
and starts the next message (GLM's ``<|observation|>``). A loop that summarises its context or asks a sub-agent shows
the engine other contexts; it returns one row for each context to be trained, and each row is matched in the same way.
Example, with ``O`` for the observation token::

    first call     prompt [u g A]                      answer [x y O]
    second call    prompt [u g A x y O s e e A]        answer [z U]
    response                     x y O s e e A z U     the chat template wrote this O, so it is not trained
    mask                         1 1 0 0 0 0 0 1 1
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from ray import cloudpickle
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.rollout_trace import rollout_trace_attr

from recipe.partial_rollout.checkpoint.row_images import digest, opened_row
from recipe.partial_rollout.config.settings import FilterSettings, Placement
from recipe.partial_rollout.manager.actor import allow_full_collections, postpone_full_collections
from recipe.partial_rollout.manager.codec import check_saveable
from recipe.partial_rollout.manager.policies import plain
from recipe.partial_rollout.manager.types import SampleOutput
from recipe.partial_rollout.worker.claim_loop import ClaimLoop
from recipe.partial_rollout.worker.live_sample import LiveSample, SampleClock, Turn, context_hash, timed
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient, ReplicaChoice, SampleClient
from recipe.partial_rollout.worker.observed import AgentLoopCall, ObservedAgentLoopWorker
from recipe.partial_rollout.worker.pictures import Pictures, images_in, kept
from recipe.partial_rollout.worker.rewards import REWARD_INFO
from verl_ext.contained import contain

_PLACES = 2**32
"""more than the tokens of any turn, so that ``turn * _PLACES + index`` identifies a token (``_align``)"""


class PartialRolloutAgentLoopWorker(ObservedAgentLoopWorker):
    """Runs verl's agent loops for the samples that its ``ClaimLoop`` claims."""

    llm_client: PartialRolloutLLMClient  # type: ignore[assignment]
    _claims: ClaimLoop
    _serving: asyncio.Task[None] | None = None
    """runs ``ClaimLoop.serve``; None before the first ``serve``"""
    _reporting: asyncio.Task[None] | None = None
    """sends the reports of the round that was closed last; None before the first ``close_round``"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._filter = FilterSettings.from_config(self.config)
        self.llm_client.tokenizer = self.tokenizer
        self._pictures = Pictures(self.config, self.tokenizer, self.processor, self.dataset_cls)

    def connect(self, name: str, manager: Any, capacity: int, servers: dict[str, Any], offset: float = 0.0) -> None:
        """Make this worker's claim loop, which claims from ``manager`` under ``name``. Called before all else.

        Args:
            capacity: most samples that may hold a slot here.
            servers: server handles of the replicas by address.
            offset: position of this worker among all workers, from 0 to below 1 (``ReplicaChoice``).
        """
        self.llm_client.replicas = ReplicaChoice(servers, offset)
        settings = self.config.partial_rollout
        self._claims = self.llm_client.claims = ClaimLoop(
            name,
            manager,
            capacity,
            self._run_leased,
            sample_s=settings.failures.sample_timeout_s,
            release_after_s=settings.tools.release_after_s,
        )

    def use_replicas(self, servers: dict[str, Any]) -> None:
        """Send calls to ``servers`` from here on: all replicas by address, those that were restarted included."""
        self.llm_client.replicas.use(servers)

    async def serve(self) -> None:
        """Run ``ClaimLoop.serve``. A driver that lost its connection calls again, which awaits the same task."""
        if self._serving is None:
            contain(asyncio.get_running_loop())
            self._serving = asyncio.create_task(self._claims.serve())
        await asyncio.shield(self._serving)

    def open_round(self) -> None:
        """Allow engine calls from here on."""
        # With separate placement rounds do not stop, so collections cannot be postponed to their end.
        if self.config.partial_rollout.placement == Placement.COLOCATED:
            postpone_full_collections()
        self._claims.open.set()

    def close_round(self) -> None:
        """Start no new engine call. Running calls end when their replica aborts them; then all is reported."""
        self._claims.open.clear()
        # The driver awaits this task with ``flush``, after the trainer's update.
        self._reporting = asyncio.create_task(self._claims.reported())
        self._reporting.add_done_callback(lambda _: allow_full_collections())

    async def flush(self) -> None:
        """Wait until the manager has every report of the closed round."""
        # A worker that replaced a dead one has closed no round yet.
        await (self._reporting or self._claims.reported())

    async def _run_leased(self, sample: LiveSample) -> SampleOutput:
        # Samples of a group share their row, and a loop or its reward may write into it.
        lease = sample.lease
        output = await self._trained(sample, {**opened_row(deepcopy(lease.row)), "uid": lease.group_uid})
        if self.config.trainer.save_freq > 0:
            # An output that can be saved in a checkpoint can also be sent to the manager.
            check_saveable(sample.id, output)
            return output
        try:
            cloudpickle.dumps([(row.extra_fields, row.reward_extra_info) for row in output.rows])  # type: ignore[attr-defined]
        except Exception as error:
            raise TypeError(
                f"sample {sample.id}: its extra fields or its reward's extra info cannot be pickled: {error}"
            ) from error
        return output

    async def _trained(self, sample: LiveSample, row: dict[str, Any]) -> SampleOutput:
        """Run the agent loop of ``sample`` on ``row``, and score what it returns."""
        config = self.rollout_config
        params = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "repetition_penalty": 1.0,
            "logprobs": config.calculate_log_probs,
        }
        make = self._maker(row.pop("agent_name", config.agent.default_agent_loop))
        client = SampleClient(self.llm_client, sample, sample.clock)
        with rollout_trace_attr(trace=False):
            outputs = await self._run_loop(make, params, row, client, self._timed_tools(sample.clock))
        sample.ended = True
        images = [images_in(output, sample.id) for output in outputs]
        with sample.clock.stopped():
            await self._score(outputs, row, on_rescore=self._claims.outbox.record_rescored)
            for output in outputs:
                # ``_score`` added it for the reward function; the dataset row has it anyway.
                output.extra_fields.pop("raw_prompt", None)
            digests = [tuple(map(digest, shown)) for shown in images]
            trained = sample_output(sample, outputs, digests)
            if not any(images):
                return trained
            own = await self._pictures.of_row(sample.lease.row)
            rows = []
            for output, made, shown, marks in zip(outputs, trained.rows, images, digests, strict=True):
                if shown:
                    await asyncio.to_thread(self._pictures.check, made, shown, output.mm_processor_kwargs)
                rows.append(replace(made, images=kept(shown, marks, own)))
            return replace(rows[-1], earlier=tuple(rows[:-1]))

    async def _attempt(self, run_loop: AgentLoopCall, trajectory: dict[str, Any]) -> list[AgentLoopOutput]:
        """Run the agent loop of a validation row once. Its time between engine calls has a training sample's limit."""
        timeout_s = self.config.partial_rollout.failures.sample_timeout_s
        clock = SampleClock(f"validation row {trajectory['sample_index']}", timeout_s)
        return await clock.run(run_loop(SampleClient(self.llm_client, None, clock), self._timed_tools(clock)))

    def _timed_tools(self, clock: SampleClock) -> list[Any]:
        """Wrap the worker's tools for the loop that ``clock`` limits: calls have deadlines, and errors are reported."""
        timeout_s = self.config.partial_rollout.failures.tool_timeout_s
        return timed(self.tools, clock, timeout_s, self._claims.outbox.record_error)


# -- tokens and the calls that made them --------------------------------------------------------------------------------


def sample_output(
    sample: LiveSample,
    outputs: Sequence[AgentLoopOutput],
    images: Sequence[tuple[bytes, ...]] | None = None,
) -> SampleOutput:
    """Return all ``outputs`` of a loop as one ``SampleOutput``: tokens, versions and engine log-probs, not padded.

    The last output was scored, and each row gets its score, as under verl's v1.

    Args:
        outputs: rows that fit a batch (``misfit``).
        images: digests of the images of each output; None: no output has images.

    Raises:
        RuntimeError: a token with mask 1 or its log-prob is not the engine's.
        ValueError: a trained token was sampled with parameters that the trainer's log-probs do not have.
    """
    shown = images or [()] * len(outputs)
    pairs = [_row(sample, *each) for each in zip(outputs, shown, strict=True)]
    rows, sources = zip(*pairs, strict=True)
    # Two rows may train the same token of the engine, for example in the beginning that two branches share.
    trained = np.unique(np.concatenate(sources))
    last = rows[-1]
    info = {key: plain(value) for key, value in (outputs[-1].extra_fields.get(REWARD_INFO) or {}).items()}
    scored = [replace(row, reward_score=plain(outputs[-1].reward_score), reward_extra_info=info) for row in rows]
    metrics = {**last.metrics, "untrained_tokens": sample.decoded - len(trained)}
    return replace(scored[-1], metrics=metrics, earlier=tuple(scored[:-1]))


def _row(sample: LiveSample, output: AgentLoopOutput, images: Sequence[bytes]) -> tuple[SampleOutput, np.ndarray]:
    """Return the row of ``output`` without a score, and the ids (``_align``) of the tokens that it trains, int64 [G].

    G is the number of tokens with mask 1.
    """
    prompt_ids = np.asarray(output.prompt_ids, dtype=np.int32)
    response_ids = np.asarray(output.response_ids, dtype=np.int32)
    mask = np.asarray(output.response_mask, dtype=np.int8)
    given = np.asarray(output.response_logprobs, dtype=np.float32) if output.response_logprobs else None
    # A turn that was shown other images had another context, even if its prompt has the same tokens.
    seen = [turn for turn in sample.turns if turn.images == tuple(images[: len(turn.images)])]
    versions, log_probs, sources = _align(sample, seen, prompt_ids, response_ids, mask.astype(bool), given)
    row = SampleOutput(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=mask,
        log_probs=log_probs,
        versions=versions,
        segments=len(sample.segments),
        reward_score=None,
        reward_extra_info={},
        num_turns=int(output.num_turns),
        metrics=output.metrics.model_dump(),
        extra_fields={key: value for key, value in output.extra_fields.items() if key != REWARD_INFO},
    )
    return row, sources[sources >= 0]


def _align(
    sample: LiveSample,
    turns: list[Turn],
    prompt_ids: np.ndarray,
    response_ids: np.ndarray,
    generated: np.ndarray,
    given: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the version (int32), the engine's log-prob (float32) and an id (int64) of each response token, each [R].

    A token that is not ``generated`` (mask 0) has version -1, log-prob 0 and id -1. The id is the turn's number times
    ``_PLACES`` plus the token's index in the turn. Two rows that train the same engine token have the same id.

    A generated token must come from one of ``turns``, which made it at its position in the sequence. If the agent loop
    returned log-probs (``given`` [R], else None), the token's must equal the engine's. If several turns fit, the
    longest prompt decides, then the earliest call.

    Raises:
        RuntimeError: no turn made a generated token, or none made it with its given log-prob.
        ValueError: a token was sampled with parameters that the trainer's log-probs do not have (``Turn.unlike``).
    """
    versions = np.full(len(response_ids), -1, np.int32)
    log_probs = np.zeros(len(response_ids), np.float32)
    made, known = np.zeros((2, len(response_ids)), bool)
    sources = np.full(len(response_ids), -1, np.int64)
    for turn, start, length in _in_place(turns, prompt_ids, response_ids):
        place, engines = slice(start, start + length), turn.log_probs[:length]
        fits = generated[place] if given is None else generated[place] & (given[place] == engines)
        versions[place][fits], log_probs[place][fits] = turn.versions[:length][fits], engines[fits]
        sources[place][fits] = (turn.number * _PLACES + np.arange(length))[fits]
        made[place] = True
        known[place] |= fits
    if (unmade := generated & ~made).any():
        raise _refusal(
            sample,
            f"{int(unmade.sum())} tokens with mask 1 that no engine call made after exactly this context. A loop that "
            f"rewrites, cuts or summarises its context, images included, must return a list of outputs, one for each "
            f"context (trainer.use_v1=True)",
        )
    if not known[generated].all():
        raise _refusal(sample, "log-probs that are not the engine's")
    for turn in sample.turns:
        if turn.unlike and (count := int((sources // _PLACES == turn.number).sum())):
            raise ValueError(
                f"sample {sample.id}: {count} of its trained tokens were sampled with {turn.unlike}. Their log-probs "
                "cannot be compared with the trainer's, which are of the whole distribution at rollout.temperature: "
                "leave the parameter out of calls that are trained, or set partial_rollout.correction=none"
            )
    return versions, log_probs, sources


def _in_place(turns: list[Turn], prompt_ids: np.ndarray, response_ids: np.ndarray) -> Iterator[tuple[Turn, int, int]]:
    """Yield each turn whose prompt begins the sequence, its start in the response, and its number of matching tokens.

    The matching tokens are the turn's first ones that the sequence repeats at that place. Incomplete turns are left
    out. Shorter prompts come first, and of equal ones the call that began last.
    """
    whole, read, context = np.concatenate([prompt_ids, response_ids]), 0, context_hash()
    for turn in sorted(turns, key=lambda turn: (turn.start, -turn.number)):
        if not turn.complete or not len(prompt_ids) <= turn.start < len(whole):
            continue
        context.update(whole[read : turn.start].tobytes())
        read = turn.start
        if context.digest() != turn.context:
            continue
        here = whole[turn.start : turn.start + len(turn)]
        same = turn.token_ids[: len(here)] == here
        yield turn, turn.start - len(prompt_ids), len(here) if same.all() else int(same.argmin())


def _refusal(sample: LiveSample, what: str) -> RuntimeError:
    return RuntimeError(
        f"sample {sample.id}: its agent loop returned {what}; partial rollout needs agent loops that return the "
        f"engine's tokens and log-probs unchanged; they may only drop the end of a turn"
    )
