"""vLLM's engine as the replica's server sees it: a request counts as admitted as soon as the engine core has it.

verl's server closes its gate before it pauses the engine, and then waits until every request that has passed the gate is
*admitted*, so that the pause covers it. verl takes a request's first output for its admission. A request that vLLM still
queues, for lack of a seat or of KV blocks, has no output: an interruption would decode the whole queue first, for up to
a minute. But ``AsyncLLM.add_request`` returns once the request is in the engine core's input queue, which the core reads
in order. A pause that is sent afterwards finds the request, running or queued, and aborts it.

verl's server reads only the last output of a request, yet asks for all of them, each with every token so far. Here it
gets only the last one, so vLLM does not make outputs that nobody reads (tests/studies/results/log.md has their cost), and
its core sends tokens in pieces (``verl_ext.piecewise_scheduler``).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, Self

from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput


class AdmittingEngine:
    """vLLM's ``AsyncLLM`` whose ``generate`` reports when a request is admitted; everything else is the engine's own.

    Args:
        engine: the ``AsyncLLM``.
        salt: of a request, by its id: it finds only KV blocks of requests with the same (``salt_of``). None: of any.
    """

    def __init__(self, engine: Any, salt: Callable[[str], str] | None = None) -> None:
        self._engine = engine
        self._salt = salt
        self._queued_s: dict[str, float] = {}
        self._coming: dict[str, bool] = {}
        """requests that the engine does not have yet, and whether they are withdrawn"""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def take_queued_s(self, request_id: str) -> float:
        """Seconds that the ended ``request_id`` was queued before it first ran; can be taken once.

        0 if unknown: with vLLM's statistics off (``disable_log_stats``), for a request that made a token.
        """
        self._coming.pop(request_id, None)
        return self._queued_s.pop(request_id, 0.0)

    def expect(self, request_id: str) -> None:
        """A request is on its way; it can be withdrawn from here on."""
        self._coming.setdefault(request_id, False)

    async def withdraw(self, request_id: str) -> None:
        """Abort one request, which may be on its way; nothing if it has ended."""
        if request_id in self._coming:
            self._coming[request_id] = True
        else:
            await self._engine.abort(request_id)

    async def pause_generation(self, **options: Any) -> None:
        """As vLLM's; the tokens that its core keeps back (``verl_ext.piecewise_scheduler``) are sent before it aborts."""
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self._engine.pause_generation(**options)

    async def generate(
        self, *, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput | None, None]:
        """``AsyncLLM.generate``, which first yields None: from then on a pause or an abort covers the request.

        The last output follows, with every token; earlier outputs only if the caller asks for DELTA. A pause ends
        the request with an output of the tokens so far: none, if it was still queued. One that is withdrawn has
        those that were sent. If the caller stops before the
        last output, its request is aborted.

        Args:
            sampling_params: not modified.
            request_id: unique.

        Raises:
            EngineDeadError: the engine has died. Other errors of the engine pass through unchanged.
        """
        queue, ended, began = None, False, time.monotonic()
        if self._salt is not None:
            prompt = {**prompt, "cache_salt": self._salt(request_id)}
        self.expect(request_id)
        try:
            queue = await self._engine.add_request(request_id, prompt, _last_only(sampling_params), **options)
            if self._coming.pop(request_id):
                await self._engine.abort(queue.request_id, internal=True)
            yield None
            while not ended:
                output = queue.get_nowait() or await queue.get()
                ended = output.finished
                if ended:
                    self._queued_s[request_id] = _queued_s(output, began)
                    _thin(output)
                yield output
        except EngineDeadError:
            ended = True
            raise
        finally:
            self._coming.pop(request_id, None)
            if not ended:
                # By the caller's id while there is no queue: the engine may have the request nevertheless.
                await self._engine.abort(request_id if queue is None else queue.request_id, internal=queue is not None)
            if queue is not None:
                queue.close()


def _last_only(params: SamplingParams) -> SamplingParams:
    """``params``, or a copy that asks only for the last output if they ask for every output with all tokens so far.

    Its log-probs are kept in lists of numbers, not in objects for each token, which Python's garbage collector walks.
    """
    if params.output_kind is RequestOutputKind.CUMULATIVE:
        params = copy(params)
        params.output_kind, params.flat_logprobs = RequestOutputKind.FINAL_ONLY, True
    return params


class _Sampled:
    """As verl's server reads a token's log-probs: ``log_probs[token].logprob``."""

    __slots__ = ("logprob",)

    def __getitem__(self, token: int) -> Self:
        return self


def _sampled(log_probs: FlatLogprobs) -> Iterator[_Sampled]:
    """The first log-prob of each token, which is the sampled token's."""
    each = _Sampled()
    for start in log_probs.start_indices:
        each.logprob = log_probs.logprobs[start]
        yield each


def _thin(output: RequestOutput) -> None:
    """Let flat log-probs be read once, and of the sampled tokens alone: vLLM makes a dictionary and an object a token.

    An interruption waits while the server's one thread does so for every token of every request.
    """
    for answer in output.outputs:
        if isinstance(answer.logprobs, FlatLogprobs):
            answer.logprobs = _sampled(answer.logprobs)  # type: ignore[assignment]


def _queued_s(output: RequestOutput, began: float) -> float:
    """Seconds that a request was queued; it arrived at ``began`` (monotonic). Without a token, it was queued to its end."""
    stats = output.metrics
    if stats is not None and stats.scheduled_ts:
        return max(0.0, stats.scheduled_ts - stats.queued_ts)
    return 0.0 if any(answer.token_ids for answer in output.outputs) else time.monotonic() - began
