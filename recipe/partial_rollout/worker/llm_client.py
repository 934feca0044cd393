"""Generation in segments: the client of partial rollout between verl's agent loops and the vLLM replicas.

``PartialRolloutLLMClient`` keeps the tokens of an aborted call as a segment, and continues once the manager grants the
sample a slot again. The agent loop does not notice, so no tool is called twice and the conversation's state stays in
place. A call that was held while the weights changed becomes one segment for each version.

All calls, those of validation too, go to replicas that ``ReplicaChoice`` chooses. verl's load balancer is not used.

A resumed call has the turn's earlier tokens in its prompt. vLLM does not count them as output, so the client adapts the
sampling parameters:

==============================  ======================================================================================
``max_tokens``, ``min_tokens``  reduced by the tokens already made
``stop``                        searched for in the text of the whole turn (``StopStrings``)
those in ``_REFUSED``           refused: vLLM applies them to each call anew and does not know of earlier calls
everything else                 unchanged: it acts on one step, or on prompt and output alike (``repetition_penalty``)
==============================  ======================================================================================

If an agent loop abandons a call (``asyncio.wait_for``), the engine decodes on until the call or the round ends, and the
tokens are discarded.
"""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from verl.utils.tokenizer.tokenizer import normalize_token_ids
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout.checkpoint.row_images import digest, listed
from recipe.partial_rollout.config.settings import Correction, ResumeKV
from recipe.partial_rollout.engine.hold import request_id_of, spans
from recipe.partial_rollout.manager.types import Segment
from recipe.partial_rollout.waits import InfraError
from recipe.partial_rollout.worker.claim_loop import ClaimLoop
from recipe.partial_rollout.worker.live_sample import (
    LiveSample,
    OneOfASample,
    ReplicaAffinity,
    Request,
    SampleClock,
    Turn,
    at_home,
    context_hash,
    digest_of,
)
from recipe.partial_rollout.worker.observed import ABORTED, REQUEST, ObservedLLMClient, version_of

_MOVE_ABOVE = 1.25
"""a resumed sample moves if its own replica has more running samples than this factor times (1 + those of the emptiest)
"""
_REFUSED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "bad_words": (None, []),
    "thinking_token_budget": (None,),
    "structured_outputs": (None,),
    "repetition_detection": (None,),
    # The generator of a resumed call would draw the noise of the turn's first tokens again.
    "seed": (None, -1),
    # A resumed call's prompt has the tokens made before.
    "prompt_logprobs": (None,),
}
"""parameters that a resumed call would apply to its own tokens only, each with the values that switch it off"""
WHOLE: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
}
"""parameters that change the distribution over the vocabulary, each with the values that leave it unchanged"""


class SampleClient(OneOfASample):
    """The client that one agent loop gets: verl's interface, callable from any thread or task.

    Args:
        client: the worker's client; it serves every attribute but ``generate``.
        sample: the sample that the agent loop makes; None in validation.
        clock: the agent loop's clock; it is stopped while the loop awaits an engine.
    """

    def __init__(self, client: PartialRolloutLLMClient, sample: LiveSample | None, clock: SampleClock) -> None:
        super().__init__()
        self._client = client
        self._sample = sample
        self._clock = clock
        self._affinity = ReplicaAffinity()
        """of a validation's agent loop; a training sample has its own"""

    @at_home
    async def generate(self, request_id: str, **options: Any) -> TokenOutput:
        """Generate a turn of the loop."""
        with self._clock.stopped():
            if self._sample is not None:
                return await self._client.generate_turn(self._sample, **options)
            return await self._client.generate(request_id, request=Request(self._affinity), **options)

    @property
    def sample_id(self) -> str | None:
        """Return the sample's id, ``epoch/position#index``; None in validation. noPR's client lacks this attribute."""
        return None if self._sample is None else self._sample.id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class ReplicaChoice:
    """Chooses a replica for each call, and counts the running samples of each replica.

    A sample that has blocks cached at a replica (``ReplicaAffinity``) goes back to it, unless it resumes after an
    interruption and that replica has many more running samples than the emptiest. Any other sample goes to the replica
    with the fewest running samples; of equals, to the one that was chosen longest ago.

    Args:
        servers: address to server handle.
        offset: position of this worker among all workers, from 0 to below 1. Each worker begins with another replica:
            one worker may have fewer samples than there are replicas, but all workers together should use every
            replica.
    """

    def __init__(self, servers: dict[str, Any], offset: float = 0.0) -> None:
        self.servers = servers
        addresses = list(servers)
        first = int(offset * len(addresses))
        self._running = dict.fromkeys(addresses[first:] + addresses[:first], 0)
        """running samples by address; the replica that was chosen last comes last"""

    def use(self, servers: dict[str, Any]) -> None:
        """Choose among ``servers`` from now on. Replicas that stay keep their counts: a weight sync may hold their
        calls.
        """
        self.servers = servers
        living = {address: count for address, count in self._running.items() if address in servers}
        self._running = {**living, **{address: 0 for address in servers if address not in living}}

    def take(self, affinity: ReplicaAffinity) -> tuple[str, Any]:
        """Choose a replica for the next call, which counts as running there until ``release``; return address, handle.

        Raises:
            InfraError: every replica has died.
        """
        if not self._running:
            raise InfraError("no vLLM replica is left: all of them have died")
        own = affinity.replica
        if affinity.resumes or own not in self._running:
            fewest = min(self._running, key=self._running.__getitem__)
            # One more than the emptiest: with few samples, a difference of one is no reason to prefill elsewhere.
            if own not in self._running or self._running[own] > _MOVE_ABOVE * (self._running[fewest] + 1):
                own = fewest
        affinity.replica, affinity.resumes = own, False
        # Put at the end: ``min`` finds the first of equals, so they take turns.
        self._running[own] = self._running.pop(own) + 1
        return own, self.servers[own]

    def release(self, address: str) -> None:
        """Note that a call at ``address`` has ended."""
        # The replica may have died since, or be back under another address.
        if address in self._running:
            self._running[address] -= 1

    def leave(self, address: str) -> bool:
        """Drop the dead replica at ``address``; returns whether any other is left."""
        self._running.pop(address, None)
        return bool(self._running)


class PartialRolloutLLMClient(ObservedLLMClient):
    """Resumes an interrupted engine call from its own tokens, under the weights that the replicas then hold."""

    replicas: ReplicaChoice
    """set by ``connect`` before any call, like ``claims``"""
    claims: ClaimLoop
    """gives a sample the slot that its calls need"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tokenizer: Any = None
        """the model's tokenizer, which ``StopStrings`` needs; set by the worker"""
        self._keeps_kv = self.config.partial_rollout.resume_kv == ResumeKV.KEEP
        self._compares = self.config.partial_rollout.correction != Correction.NONE
        """whether the loss compares the trainer's log-probs with the engine's; only then ``unlike_training`` checks the
        sampling parameters of a call
        """

    def _vllm_request_id(self, request_id: str) -> str:
        sample = REQUEST.get().sample
        if sample is None:
            return super()._vllm_request_id(request_id)
        return request_id_of(sample.lease.group_uid, sample.first_version)

    async def _acquire_server(self, request_id: str, **extra: Any):
        request = REQUEST.get()
        request.address, server = self.replicas.take(request.affinity)
        return request.address, server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        self.replicas.release(server_id)

    async def generate_turn(
        self, sample: LiveSample, *, prompt_ids: Any, sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Generate one turn of ``sample``, in one engine call or in several if it is interrupted.

        Args:
            prompt_ids: token ids, in any form that verl's server takes (``normalize_token_ids``).
            sampling_params: parameters of verl's server. The engine gives log-probs whether or not they ask for any.

        Returns:
            verl's ``TokenOutput`` with the tokens and log-probs of all its calls, and ``min_global_steps`` and
                ``max_global_steps`` over them. If the lease brought the complete turn from a worker that died, no call
                is made.

        Raises:
            RuntimeError: the engine returned tokens without one finite log-prob each.
            ValueError: a sampling parameter would not survive an interruption.
            asyncio.CancelledError: the agent loop has returned.
        """
        check_sampling(sample.id, sampling_params)
        # A loop may ask for no log-probs; the loss needs them.
        prompt_ids, params = normalize_token_ids(prompt_ids), {**sampling_params, "logprobs": True}
        rollout = self.config.actor_rollout_ref.rollout
        unlike = unlike_training(sampling_params, rollout.temperature) if self._compares else ""
        known = sample.turns[-1].start + len(sample.turns[-1]) if sample.turns else 0
        prompt = np.asarray(prompt_ids, np.int32)
        context = context_hash(prompt).digest()
        images = tuple(map(digest, listed(kwargs.get("image_data"))))
        request_digest = digest_of(b"".join([context, *images]), sampling_params)
        turn = sample.start_turn(len(prompt), context, request_digest, unlike, images)
        last = await self._complete(sample, turn, prompt_ids, params, min(known, len(prompt)), kwargs)
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
        """Call the engine until ``turn`` is complete; return the last output, None if no call was needed.

        Args:
            known: tokens of the prompt that an engine has read or decoded in earlier turns.
        """
        last, stops = None, None
        # The earliest group first: the engine then preempts the newest (``main_ppo.apply_overrides`` sets the policy).
        kwargs["priority"] = sample.lease.order
        budget = self._budget(len(prompt_ids), params)
        if params.get("stop"):
            stops = StopStrings(self.tokenizer, prompt_ids, params, turn.segments)
        while not turn.complete:
            done = [int(token) for segment in turn.segments for token in segment.token_ids]
            began = time.time()
            async with self.claims.engine_call(sample):
                request = Request(
                    sample.affinity,
                    sample,
                    resumed_tokens=len(prompt_ids) + len(done) if turn.segments else known,
                    waited_s=time.time() - began,
                )
                try:
                    last = await self.generate(
                        sample.id,
                        request=request,
                        prompt_ids=prompt_ids + done,
                        sampling_params=sampling_of_call(params, budget, len(done)),
                        **kwargs,
                    )
                except InfraError:
                    # The driver notices the death too, and restarts the replica before the next weight sync.
                    if not self.replicas.leave(request.address):
                        raise
                    # Ask again: `take` chooses a living replica.
                    continue
                self._book(sample, turn, self._segments(last, budget - len(done)), stops)
        return last

    def _book(self, sample: LiveSample, turn: Turn, segments: list[Segment], stops: StopStrings | None) -> None:
        """Add a call's ``segments`` to ``turn``, up to a stop string. If the turn is incomplete, release the slot."""
        for segment in segments:
            # A stop string in an earlier version's tokens ends the turn, and what follows it is dropped.
            if not turn.complete:
                sample.add(turn, stops.end(segment) if stops else segment)
        if not turn.complete:
            sample.affinity.resumes = True
            if not self._keeps_kv:
                # The replica's cache is emptied with its weights, so the sample may resume anywhere.
                sample.affinity.replica = None
            self.claims.release_slot(sample)

    def _budget(self, prompt: int, params: dict[str, Any]) -> int:
        """Return how many tokens an uninterrupted call could generate (the rule of ``vLLMHttpServer.generate``)."""
        rollout = self.config.actor_rollout_ref.rollout
        most = min(rollout.response_length, rollout.prompt_length + rollout.response_length - prompt)
        return int(params.get("max_tokens", params.get("max_new_tokens", most)))

    @staticmethod
    def _segments(output: TokenOutput, budget: int) -> list[Segment]:
        """Divide the tokens of one call into segments, one for each version that made some of them.

        Only the last segment may have a stop reason. A call that is aborted after the last token of its budget is
        complete.
        """
        interrupted = output.stop_reason in ABORTED and len(output.token_ids) < budget
        stop_reason = "completed" if output.stop_reason in (None, *ABORTED) else output.stop_reason
        token_ids = np.asarray(output.token_ids, dtype=np.int32)
        made = np.asarray(output.log_probs or [], dtype=np.float32)
        *earlier, last = spans(len(token_ids), output.extra_fields.pop("version_marks", ()), version_of(output))
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


# -- sampling parameters across interruptions ---------------------------------------------------------------------------


def check_sampling(sample_id: str, params: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a parameter that vLLM would apply anew after each interruption."""
    for key, off in _REFUSED.items():
        if (value := params.get(key)) not in off:
            raise ValueError(
                f"sample {sample_id}: its agent loop asks for {key}={value!r}, which vLLM applies to each call anew, so an "
                f"interruption would change its effect: leave the parameter out, or set partial_rollout.enable=False"
            )


def unlike_training(params: dict[str, Any], temperature: float) -> str:
    """Return the first parameter that makes the engine's distribution differ from the trainer's, as "name=value".

    Return "" if none does. The engine reports log-probs under its own distribution, which with ``top_p``, for example, is
    normalised over the tokens that are kept.

    Args:
        temperature: the temperature at which the trainer computes log-probs.

    >>> unlike_training({"temperature": 1.0, "top_p": 0.7, "top_k": -1}, 1.0), unlike_training({"top_p": 1.0}, 1.0)
    ('top_p=0.7', '')
    """
    if (own := params.get("temperature", 1.0)) != temperature:
        return f"temperature={own}"
    asks = {key: value for key, value in params.items() if key in WHOLE and value is not None}
    return next((f"{key}={value}" for key, value in asks.items() if value not in WHOLE[key]), "")


def sampling_of_call(params: dict[str, Any], budget: int, made: int) -> dict[str, Any]:
    """Return the sampling parameters of a call that continues a turn after ``made`` of its ``budget`` tokens.

    ``params`` are those of the whole turn.
    """
    others = {key: value for key, value in params.items() if key != "max_new_tokens"}
    least = max(0, (params.get("min_tokens") or 0) - made)
    return {**others, "max_tokens": budget - made, "min_tokens": least}


class StopStrings:
    """Finds stop strings in a whole turn, with vLLM's own detokenizer and search.

    The engine's detokenizer sees the tokens of one call and misses a stop string that begins before an interruption and
    ends after it. The turn is cut after the token that completes a stop string: vLLM returns this token even if its
    text excludes the string (``include_stop_str_in_output=False``). Later tokens of the resumed call are dropped.

    Args:
        tokenizer: the worker's tokenizer.
        prompt_ids: the turn's prompt.
        params: the turn's sampling parameters, with ``stop``.
        turn: the turn's segments so far.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int], params: dict[str, Any], turn: list[Segment]) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        text_keys = ("stop", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens")
        request: Any = SimpleNamespace(
            request_id="stop strings",
            prompt_token_ids=prompt_ids,
            prompt_embeds=None,
            sampling_params=SamplingParams(max_tokens=None, **{key: params[key] for key in text_keys if key in params}),
        )
        self._text = IncrementalDetokenizer.from_new_request(tokenizer, request)
        for segment in turn:
            self.end(segment)

    def end(self, segment: Segment) -> Segment:
        """Return the turn's next ``segment``, cut after the token that completes a stop string, if one does."""
        for index, token in enumerate(segment.token_ids.tolist()):
            if self._text.update([token], stop_terminated=False) is not None:
                kept = slice(index + 1)
                return replace(
                    segment,
                    token_ids=segment.token_ids[kept],
                    log_probs=segment.log_probs[kept],
                    stop_reason=segment.stop_reason or "completed",
                )
        return segment
