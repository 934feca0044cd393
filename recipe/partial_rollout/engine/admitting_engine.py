"""vLLM's engine as the replica's server drives it: a request counts as admitted once the engine core has it.

verl's server closes its gate before it pauses the engine, and then waits for every request that has passed the gate to
be *admitted*, so that the pause covers it. verl takes a request's first output for its admission. A request that vLLM
still queues, for want of a seat or of KV blocks, has none: interruption would decode the whole queue first, for up to
a minute. But ``AsyncLLM.add_request`` returns once the request is in the engine core's input queue, which the core reads
in order: a pause that is sent afterwards finds it, running or queued, and aborts it.

verl's server reads the last output of a request only, yet asks for all of them, each with every token so far. Here it gets
the last one only: what vLLM makes of every step for nobody is then not made (``python -m recipe.partial_rollout.tools bench
outputs`` measures it). vLLM's ``stream_interval`` does not help: it holds back outputs of kind DELTA, which verl's are not.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput


class AdmittingEngine:
    """vLLM's ``AsyncLLM`` whose ``generate`` says when a request is admitted; everything else is the engine's own.

    Args:
        engine: the ``AsyncLLM``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._queued_s: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def take_queued_s(self, request_id: str) -> float:
        """Seconds that the ended ``request_id`` was queued before it first ran, once.

        0 where that is not known: with vLLM's statistics off (``disable_log_stats``), of a request that made a token.
        """
        return self._queued_s.pop(request_id, 0.0)

    async def generate(
        self, *, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput | None, None]:
        """``AsyncLLM.generate``, which first yields None: from then on a pause or an abort covers the request.

        The last output follows, with every token; those before it only if the caller asks for DELTA. An abort ends
        the request with an output of the tokens so far: none, if it was still queued. A caller that goes away before
        the last output takes its request with it.

        Args:
            sampling_params: left as they are.
            request_id: no other request has it.

        Raises:
            EngineDeadError: the engine has died. Other errors are the engine's own, as they are.
        """
        queue, ended, began = None, False, time.monotonic()
        try:
            queue = await self._engine.add_request(request_id, prompt, _last_only(sampling_params), **options)
            yield None
            while not ended:
                output = queue.get_nowait() or await queue.get()
                ended = output.finished
                if ended:
                    self._queued_s[request_id] = _queued_s(output, began)
                yield output
        except EngineDeadError:
            ended = True
            raise
        finally:
            if not ended:
                # By the caller's id while there is no queue: the engine may have the request all the same.
                await self._engine.abort(request_id if queue is None else queue.request_id, internal=queue is not None)
            if queue is not None:
                queue.close()


def _last_only(params: SamplingParams) -> SamplingParams:
    """``params``, or a copy of them where they ask for every output with all tokens before it."""
    if params.output_kind is RequestOutputKind.CUMULATIVE:
        params = copy(params)
        params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _queued_s(output: RequestOutput, began: float) -> float:
    """Seconds that a request was queued; ``began`` is when it came (monotonic). One without a token was so to its end."""
    stats = output.metrics
    if stats is not None and stats.scheduled_ts:
        return max(0.0, stats.scheduled_ts - stats.queued_ts)
    return 0.0 if any(answer.token_ids for answer in output.outputs) else time.monotonic() - began
