"""Generation in segments: the client between verl's agent loops and the vLLM replicas.

``ObservedLLMClient`` is verl's client and notes every engine call; noPR uses it. ``PartialRolloutLLMClient`` turns an
aborted call into a cached segment and continues once the manager grants the sample a slot again. The agent loop above
does not notice, so tools are not called twice and conversation state stays in place. A call that was held while the
weights changed becomes a segment for each version.

A context variable names the training sample; without one (validation) a call is verl's own.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from contextvars import ContextVar
from typing import Any, Self

import numpy as np
from ray.exceptions import RayActorError
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout.config.settings import ResumeKV
from recipe.partial_rollout.engine.hold import request_id_of, spans
from recipe.partial_rollout.manager.types import Segment
from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.waits import ReplicaError, answer_of, means_death, one_line
from recipe.partial_rollout.worker.live_sample import (
    LIVE_SAMPLE,
    LiveSample,
    OneOfASample,
    Request,
    SampleClock,
    Turn,
    at_home,
    context_hash,
    digest_of,
)
from recipe.partial_rollout.worker.resumption import StopStrings, check_sampling, sampling_of_call

ABORTED = ("aborted", "abort")
_MARKS = "version_marks"
_ID_DIGITS = 12
"""of the 32 in verl's request ids: enough to tell the samples of a run apart in its trace"""
_MOVE_ABOVE = 1.25
"""a resumed sample moves if its own replica has more than this many times the running samples of the emptiest"""


_REQUEST: ContextVar[Request | None] = ContextVar("request", default=None)
"""in which the running call notes where it goes"""


def _version(output: TokenOutput) -> int:
    """Policy version that made the last token of ``output``; -1 if the replica did not say."""
    version = output.extra_fields.get("global_steps")
    return -1 if version is None else int(version)


class ObservedLLMClient(LLMServerClient):
    """verl's client; remembers what each engine call cost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls: list[EngineCall] = []

    @classmethod
    def over(cls, client: LLMServerClient) -> Self:
        """The same connection as ``client``."""
        return cls(config=client.config, load_balancer_handle=client._load_balancer)

    def take_calls(self) -> list[EngineCall]:
        """Calls that ended since this was last called."""
        calls, self._calls = self._calls, []
        return calls

    async def _acquire_server(self, request_id: str, **extra: Any):
        server_id, handle = await self._choose_server(request_id, **extra)
        if (request := _REQUEST.get()) is not None:
            request.address, request.server = server_id, handle
        return server_id, handle

    async def _choose_server(self, request_id: str, **extra: Any):
        return await super()._acquire_server(request_id, **extra)

    async def generate(  # type: ignore[override]
        self,
        request_id: str,
        *,
        request: Request | None = None,
        resumed_tokens: int = 0,
        begins: bool = False,
        waited_s: float = 0.0,
        **kwargs: Any,
    ) -> TokenOutput:
        """``LLMServerClient.generate``, noted.

        Args:
            request: where to note where it goes.
            resumed_tokens: of the prompt, those that an engine has read or made before.
            begins: whether it begins a turn.
            waited_s: see ``EngineCall``.

        Raises:
            ReplicaError: the replica died or refused the request; the message names it.
        """
        params = kwargs.get("sampling_params", {})
        if not params.get("stop"):
            # Tokens in, tokens out: no one reads the text that the server would otherwise decode token by token.
            kwargs["sampling_params"] = {"detokenize": False, **params}
        sample, request, start = LIVE_SAMPLE.get(), request or Request(), time.time()
        output = await self._asked(request_id, request, kwargs)
        # A call that was aborted in the engine's queue prefilled nothing.
        prefilled = resumed_tokens if output.token_ids else 0
        self._calls.append(
            EngineCall(
                replica=request.address,
                start=start,
                end=time.time(),
                tokens=len(output.token_ids),
                version=_version(output),
                resumed_tokens=max(0, prefilled - (output.extra_fields.get("num_cached_tokens") or 0)),
                context_tokens=len(kwargs.get("prompt_ids", ())),
                queued_s=float(output.extra_fields.pop("queued_s", None) or 0.0),
                # A sample of noPR has no other name than the request id that verl keeps for all its turns.
                sample=request_id[:_ID_DIGITS] if sample is None else sample.id,
                interrupted=output.stop_reason in ABORTED,
                earlier_tokens=prefilled if begins else 0,
                waited_s=round(waited_s, 3),
            )
        )
        return output

    async def _asked(self, request_id: str, request: Request, kwargs: dict[str, Any]) -> TokenOutput:
        """verl's answer."""
        token, verls = _REQUEST.set(request), super().generate
        try:
            # A call that is made again goes to vLLM under an id of its own.
            return await answer_of(lambda: verls(request_id=request_id, **kwargs))
        except Exception as error:
            name = request.address or "(none acquired)"
            raise ReplicaError(
                f"vLLM replica {name} failed on request {request_id}: {one_line(error)}", dead=means_death(error)
            ) from error
        finally:
            _REQUEST.reset(token)


class SampleClient(OneOfASample):
    """verl's client for one agent loop, in whatever thread or task it generates.

    A context variable tells the other calls of a worker apart, and an executor's threads do not have it.

    Args:
        client: the worker's; everything but ``generate`` is its own.
        sample: that the tokens belong to; None in validation.
        clock: of the loop; it stands while the loop awaits an engine.
    """

    def __init__(self, client: PartialRolloutLLMClient, sample: LiveSample | None, clock: SampleClock) -> None:
        self._client = client
        self._sample = sample
        self.clock = clock

        async def generate(request_id: str, **request: Any) -> TokenOutput:
            with clock.stopped():
                return await client.generate(request_id, **request)

        self.generate = at_home(sample, generate)

    @property
    def sample_id(self) -> str | None:
        """``epoch/position#index``; None in validation. Under noPR a client has no such attribute."""
        return None if self._sample is None else self._sample.id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class ReplicaChoice:
    """Counts running samples by replica.

    A sample that has blocks cached at a replica (``LiveSample.replica``) goes back to it, unless it resumes after an
    interruption and that replica has many more running samples than the emptiest. Any other sample goes to the replica
    with the fewest running samples; of equals, to the one that no sample has gone to for longest.

    Args:
        servers: address to server handle.
        place: position of this worker among all, from 0 to 1. Workers begin at different replicas, because each has too
            few samples to reach all of many replicas, and together they should.
    """

    def __init__(self, servers: dict[str, Any], place: float = 0.0) -> None:
        self.servers = servers
        addresses = list(servers)
        first = int(place * len(addresses))
        self._running = dict.fromkeys(addresses[first:] + addresses[:first], 0)
        """running samples by address; the one that was taken last comes last"""

    def use(self, servers: dict[str, Any]) -> None:
        """From here on the replicas are ``servers``; those that stay keep their counts, whose calls may be held."""
        self.servers = servers
        living = {address: count for address, count in self._running.items() if address in servers}
        self._running = {**living, **{address: 0 for address in servers if address not in living}}

    def take(self, sample: LiveSample) -> tuple[str, Any]:
        """Address and handle for the next call of ``sample``, which counts as running there until ``release``."""
        fewest = min(self._running, key=self._running.__getitem__)
        own = sample.replica if sample.replica in self._running else fewest
        if sample.resumes and self._running[own] > _MOVE_ABOVE * (self._running[fewest] + 1):
            own = fewest
        sample.replica, sample.resumes = own, False
        self._running[own] = self._running.pop(own) + 1
        return own, self.servers[own]

    def of_request(self, request_id: str) -> tuple[str, Any]:
        """Address and handle for the calls of a request that no training sample makes; they are not counted."""
        addresses = sorted(self._running)
        own = addresses[zlib.crc32(request_id.encode()) % len(addresses)]
        return own, self.servers[own]

    def release(self, address: str) -> None:
        """Note that a call at ``address`` has ended."""
        if address in self._running:
            self._running[address] -= 1

    def leave(self, sample: LiveSample, address: str) -> bool:
        """Drop the dead replica at ``address``, where ``sample`` was; returns whether any other is left."""
        self._running.pop(address, None)
        if sample.replica == address:
            sample.replica = None
        return bool(self._running)


class PartialRolloutLLMClient(ObservedLLMClient):
    """Resumes an interrupted engine call from its own tokens, under the weights that the replicas then hold."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replicas: ReplicaChoice | None = None
        """chooses for training samples, and for all other calls once verl's load balancer has died"""
        self.tokenizer: Any = None
        """the model's; finds stop strings"""
        self._balancer_lives = True
        custom = getattr(self.config.actor_rollout_ref.rollout, "custom", None) or {}
        self._keeps_kv = custom.get("resume_kv") == ResumeKV.KEEP

    def _vllm_request_id(self, request_id: str) -> str:
        sample, request = LIVE_SAMPLE.get(), _REQUEST.get()
        if sample is None:
            return super()._vllm_request_id(request_id)
        made = request_id_of(sample.group, sample.first_version)
        if request is not None:
            request.id = made
        return made

    async def _choose_server(self, request_id: str, **extra: Any):
        sample = LIVE_SAMPLE.get()
        if self.replicas is None:
            return await super()._choose_server(request_id, **extra)
        if sample is not None:
            return self.replicas.take(sample)
        if self._balancer_lives:
            try:
                return await super()._choose_server(request_id, **extra)
            except RayActorError as error:
                # It died with its node, which may be any.
                self._balancer_lives = not means_death(error)
        return self.replicas.of_request(request_id)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        if LIVE_SAMPLE.get() is not None and self.replicas is not None:
            self.replicas.release(server_id)
        elif self._balancer_lives:
            super()._release_server(server_id, request_id)

    async def generate(  # type: ignore[override]
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Generate one turn, in one engine call or in several if it is interrupted.

        Returns:
            verl's ``TokenOutput`` with the tokens and log-probs of all its calls, and ``min_global_steps`` and
            ``max_global_steps`` over them. A turn that is complete in the journal makes no call.

        Raises:
            RuntimeError: the engine returned tokens without one log-prob each.
            SamplingError: a sampling parameter would not survive an interruption (``resumption``).
        """
        sample = LIVE_SAMPLE.get()
        if sample is None:
            last = await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)
            last.extra_fields.pop(_MARKS, None)
            return last
        sample.require_life()
        check_sampling(sample.id, sampling_params, self.tokenizer)
        known = sample.turns[-1].start + len(sample.turns[-1]) if sample.turns else 0
        prompt = np.asarray(prompt_ids, np.int32)
        context = context_hash(prompt).digest()
        turn = sample.start_turn(len(prompt), context, digest_of(context, sampling_params))
        turn.task = asyncio.create_task(
            self._complete(sample, turn, prompt.tolist(), sampling_params, min(known, len(prompt)), kwargs)
        )
        # A loop that gives the call up leaves an error that nobody else reads.
        turn.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            last = await asyncio.shield(turn.task)
        except asyncio.CancelledError:
            sample.give_up(turn)
            raise
        except Exception as error:
            if not turn.given_up:
                raise
            raise asyncio.CancelledError from error
        if turn.given_up:
            raise asyncio.CancelledError
        # The turn has the tokens; the task would keep them twice.
        turn.task = None
        return self._merge(turn.segments, last)

    async def _complete(
        self,
        sample: LiveSample,
        turn: Turn,
        prompt_ids: list[int],
        params: dict[str, Any],
        known: int,
        kwargs: dict[str, Any],
    ) -> TokenOutput | None:
        """Ask until ``turn`` is complete or given up; returns the last answer, None if none was needed.

        Args:
            known: tokens of the prompt that the engines have seen.
        """
        last, stops = None, None
        if self.config.actor_rollout_ref.rollout.scheduling_policy == "priority":
            kwargs["priority"] = sample.priority
        budget = self._budget(prompt_ids, params)
        params = {key: value for key, value in params.items() if key != "max_new_tokens"}
        if params.get("stop"):
            stops = StopStrings(self.tokenizer, prompt_ids, params, turn.segments)
        while not (turn.complete or turn.given_up):
            done = [int(token) for segment in turn.segments for token in segment.token_ids]
            asked = time.time()
            async with sample.keeper.engine_call(sample):
                sample.calls += 1
                turn.request = request = Request()
                try:
                    last = await super().generate(
                        f"{sample.id}@{sample.calls}",
                        request=request,
                        resumed_tokens=len(prompt_ids) + len(done) if turn.segments else known,
                        begins=not turn.segments,
                        waited_s=time.time() - asked,
                        prompt_ids=prompt_ids + done,
                        sampling_params=sampling_of_call(params, budget, len(done)),
                        **kwargs,
                    )
                except ReplicaError as error:
                    self._leave(sample, request.address, error)
                    continue
                finally:
                    turn.request = None
                for segment in self._segments(last, budget - len(done)):
                    if not turn.complete:
                        sample.add(turn, stops.end(segment) if stops else segment)
                if not (turn.complete or turn.given_up):
                    sample.resumes = True
                    if not self._keeps_kv:
                        # The replica's cache is emptied with its weights, so the sample may resume anywhere.
                        sample.replica = None
                    sample.keeper.release_slot(sample)
        return last

    def _leave(self, sample: LiveSample, address: str, error: ReplicaError) -> None:
        """Move to another replica if that at ``address`` is dead; raises if that does not help."""
        if not error.dead or self.replicas is None or not self.replicas.leave(sample, address):
            raise error

    def _budget(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> int:
        """Tokens that an uninterrupted call could generate (the rule of ``vLLMHttpServer.generate``)."""
        for key in ("max_tokens", "max_new_tokens"):
            if key in sampling_params:
                return int(sampling_params[key])
        rollout = self.config.actor_rollout_ref.rollout
        return min(rollout.response_length, rollout.prompt_length + rollout.response_length - len(prompt_ids))

    @staticmethod
    def _segments(output: TokenOutput, budget: int) -> list[Segment]:
        """The tokens of one call, a segment for each version that made some; only the last may have a stop reason.

        A call that is aborted after its last token counts as complete.
        """
        interrupted = output.stop_reason in ABORTED and len(output.token_ids) < budget
        stop_reason = "completed" if output.stop_reason in (None, *ABORTED) else output.stop_reason
        token_ids, made = (
            np.asarray(output.token_ids, dtype=np.int32),
            np.asarray(output.log_probs or [], dtype=np.float32),
        )
        *earlier, last = spans(len(token_ids), output.extra_fields.pop(_MARKS, ()), _version(output))
        return [
            *[Segment(token_ids[a:b], made[a:b], version) for a, b, version in earlier],
            Segment(token_ids[last.start :], made[last.start :], last.version, None if interrupted else stop_reason),
        ]

    @staticmethod
    def _merge(turn: list[Segment], last: TokenOutput | None) -> TokenOutput:
        versions = [segment.version for segment in turn]
        fields = {"global_steps": versions[-1]} if last is None else last.extra_fields
        return TokenOutput(
            token_ids=[int(t) for segment in turn for t in segment.token_ids],
            log_probs=[float(p) for segment in turn for p in segment.log_probs],
            stop_reason=turn[-1].stop_reason,
            num_preempted=0 if last is None else last.num_preempted,
            extra_fields={
                **fields,
                "min_global_steps": min(versions),
                "max_global_steps": max(versions),
            },
        )
