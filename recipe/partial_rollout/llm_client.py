"""Generation in segments: the client between verl's agent loops and the vLLM replicas.

``ObservedLLMClient`` is verl's client that notes every engine call; noPR uses it. ``PartialRolloutLLMClient`` turns an
aborted call into a cached segment and goes on when the manager grants the sample a slot again: the agent loop above
never notices, so tools are not called twice and conversation state stays where it is.

A training sample is found through a context variable; without one (validation, probe) a call is verl's own.
"""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout.failures import one_line
from recipe.partial_rollout.types import Segment

ABORTED = ("aborted", "abort")

_REPLICA: ContextVar[list[str] | None] = ContextVar("replica", default=None)
"""where the running call notes the replica that the load balancer chose"""


class ReplicaError(RuntimeError):
    """A vLLM replica did not answer a request."""


def _version(output: TokenOutput) -> int:
    """Policy version that made ``output``; -1 when the replica did not say."""
    version = output.extra_fields.get("global_steps")
    return -1 if version is None else int(version)


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request to a replica, as its client saw it."""

    replica: str
    """the load balancer's server id"""
    start: float
    """unix seconds"""
    end: float
    tokens: int
    """decoded by this call"""
    version: int
    """policy version that the replica held; -1 when it did not say"""
    resumed_tokens: int = 0
    """prompt and response tokens that it had to read again because the sample was interrupted"""


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
        """The calls that ended since the last time this was asked."""
        calls, self._calls = self._calls, []
        return calls

    async def _acquire_server(self, request_id: str, **extra: Any):
        server_id, handle = await self._choose_server(request_id, **extra)
        if (replica := _REPLICA.get()) is not None:
            replica.append(server_id)
        return server_id, handle

    async def _choose_server(self, request_id: str, **extra: Any):
        return await super()._acquire_server(request_id, **extra)

    async def generate(  # type: ignore[override]
        self, request_id: str, *, resumed_tokens: int = 0, **kwargs: Any
    ) -> TokenOutput:
        """``LLMServerClient.generate``, noted.

        Raises:
            ReplicaError: the replica died or refused the request; the message names it.
        """
        params = kwargs.get("sampling_params", {})
        if not params.get("stop"):
            # Tokens in, tokens out: no one reads the text that the server would otherwise decode token by token.
            kwargs["sampling_params"] = {"detokenize": False, **params}
        replica: list[str] = []
        token = _REPLICA.set(replica)
        start = time.time()
        try:
            output = await super().generate(request_id=request_id, **kwargs)
        except Exception as error:
            name = replica[0] if replica else "(none acquired)"
            raise ReplicaError(f"vLLM replica {name} failed on request {request_id}: {one_line(error)}") from error
        finally:
            _REPLICA.reset(token)
        tokens, version = len(output.token_ids), _version(output)
        self._calls.append(EngineCall(replica[0], start, time.time(), tokens, version, resumed_tokens))
        return output


class SlotKeeper(Protocol):
    """What a running sample asks of its worker."""

    def engine_call(self, sample_id: str) -> AbstractAsyncContextManager[None]:
        """Entered once the sample holds a slot in an open round; left when the replica has answered."""
        ...

    def hand_in(self, sample_id: str, segment: Segment | None) -> None:
        """Give the slot back, with the tokens of the interrupted call."""
        ...


@dataclass(slots=True)
class LiveSample:
    """A training sample in its worker."""

    id: str
    keeper: SlotKeeper
    priority: int
    segments: list[Segment] = field(default_factory=list)
    """every engine call so far, in order"""
    restored: list[Segment] = field(default_factory=list)
    """cached by a worker that has died: the first call goes on from them"""
    calls: int = 0
    replica: str | None = None
    """where its last call of this round ran: the next turn finds its prefix cached there"""


LIVE_SAMPLE: ContextVar[LiveSample | None] = ContextVar("live_sample", default=None)


class PartialRolloutLLMClient(ObservedLLMClient):
    """Resumes an interrupted engine call from its own tokens, under whatever weights the replicas hold by then.

    A resumed sample may go to any replica, so it goes to the one with the fewest running samples of this worker.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._servers: dict[str, Any] = {}
        self._running: dict[str, int] = {}

    def use_replicas(self, servers: dict[str, Any]) -> None:
        """Balance training samples over ``servers`` (address to server handle) by sample count."""
        self._servers = dict(servers)
        self._running = dict.fromkeys(servers, 0)

    async def _choose_server(self, request_id: str, **extra: Any):
        sample = LIVE_SAMPLE.get()
        if sample is None or not self._servers:
            return await super()._choose_server(request_id, **extra)
        if sample.replica is None:
            sample.replica = min(self._running, key=self._running.__getitem__)
        self._running[sample.replica] += 1
        return sample.replica, self._servers[sample.replica]

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        if LIVE_SAMPLE.get() is None or not self._servers:
            super()._release_server(server_id, request_id)
        else:
            self._running[server_id] -= 1

    async def generate(  # type: ignore[override]
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Tokens of one turn, over as many engine calls as interruptions make of it.

        Returns:
            verl's ``TokenOutput`` with the tokens and log-probs of all its calls, and ``min_global_steps`` and
            ``max_global_steps`` over them.

        Raises:
            RuntimeError: the engine returned tokens without one log-prob each.
        """
        sample = LIVE_SAMPLE.get()
        if sample is None:
            return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)
        prompt_ids = [int(token) for token in prompt_ids]
        if self.config.actor_rollout_ref.rollout.scheduling_policy == "priority":
            kwargs["priority"] = sample.priority
        budget = self._budget(prompt_ids, sampling_params)
        sampling_params = {key: value for key, value in sampling_params.items() if key != "max_new_tokens"}
        turn, sample.restored = sample.restored, []
        sample.segments.extend(turn)
        while True:
            done = [int(token) for segment in turn for token in segment.token_ids]
            async with sample.keeper.engine_call(sample.id):
                sample.calls += 1
                output = await super().generate(
                    f"{sample.id}@{sample.calls}",
                    resumed_tokens=len(prompt_ids) + len(done) if sample.calls > 1 and turn else 0,
                    prompt_ids=prompt_ids + done,
                    sampling_params={**sampling_params, "max_tokens": budget - len(done)},
                    **kwargs,
                )
            segment = self._segment(sample.id, output)
            if len(segment):
                turn.append(segment)
                sample.segments.append(segment)
            if output.stop_reason not in ABORTED or len(done) + len(segment) >= budget:
                return self._merge(turn, output)
            # The replica's cache goes with its weights: nothing binds the sample to it.
            sample.replica = None
            sample.keeper.hand_in(sample.id, segment)

    def _budget(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> int:
        """Tokens that an uninterrupted call could generate (the rule of ``vLLMHttpServer.generate``)."""
        for key in ("max_tokens", "max_new_tokens"):
            if key in sampling_params:
                return int(sampling_params[key])
        rollout = self.config.actor_rollout_ref.rollout
        return min(rollout.response_length, rollout.prompt_length + rollout.response_length - len(prompt_ids))

    @staticmethod
    def _segment(sample_id: str, output: TokenOutput) -> Segment:
        log_probs = output.log_probs or []
        if len(log_probs) != len(output.token_ids):
            raise RuntimeError(
                f"sample {sample_id}: the engine returned {len(output.token_ids)} tokens and {len(log_probs)} "
                f"log-probs; partial rollout needs rollout.calculate_log_probs=True"
            )
        return Segment(
            token_ids=np.asarray(output.token_ids, dtype=np.int32),
            log_probs=np.asarray(log_probs, dtype=np.float32),
            version=_version(output),
        )

    @staticmethod
    def _merge(turn: list[Segment], last: TokenOutput) -> TokenOutput:
        versions = [segment.version for segment in turn] or [-1]
        return TokenOutput(
            token_ids=[int(t) for segment in turn for t in segment.token_ids],
            log_probs=[float(p) for segment in turn for p in segment.log_probs],
            stop_reason="completed" if last.stop_reason in ABORTED else last.stop_reason,
            num_preempted=last.num_preempted,
            extra_fields={
                **last.extra_fields,
                "min_global_steps": min(versions),
                "max_global_steps": max(versions),
            },
        )
