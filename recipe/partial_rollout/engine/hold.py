"""A hold: vLLM's engine stands still with its requests in place, while its weights change.

An interruption ends every request, and each comes back as a new one. A hold ends none: requests keep their seats and
their tokens, and go on after ``resume_generation``. Requests that arrive meanwhile are accepted, and scheduled then.

``freeze`` returns when every token of the old weights is counted: the engine core answers once no step is in flight,
asynchronous scheduling included, and sends its answer behind the tokens; then they are awaited at the output processor.

With ``resume_kv=recompute`` a hold also empties the KV cache. vLLM preempts the running requests for that: they queue
again in their order, and prefill prompt and tokens under the new weights. With ``keep`` they go on over the old blocks.
"""

from __future__ import annotations

import asyncio
from typing import Any


async def freeze(engine: Any, *, clear_kv: bool) -> None:
    """Hold ``engine``; returns when its output processor has every token made so far. Holding it twice is the same as once.

    Args:
        engine: vLLM's ``AsyncLLM``.
        clear_kv: empty the KV cache, those of running requests and of connectors too.

    Raises:
        EngineDeadError: the engine has died.
        RuntimeError: vLLM could not empty the cache, because a KV transfer is under way.
    """
    # All that ``pause_generation`` does beyond this is to sleep for 20 ms, so that outputs may be processed meanwhile.
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    await _all_processed(engine)
    if clear_kv:
        await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    # Of the vision tower. The cache of multi-modal inputs depends on no weights, and emptying it while requests arrive
    # would leave vLLM's front and core with different contents.
    await engine.reset_encoder_cache()


async def _all_processed(engine: Any) -> None:
    """Wait until vLLM's output handler has processed everything received so far."""
    from vllm.v1.engine import EngineCoreOutputs

    core = engine.engine_core
    # The handler takes one item at a time and processes it whole. So once it has taken an item without tokens from
    # behind all others, it has processed those. vLLM's loggers know the client's engines only: the item names one.
    core.outputs_queue.put_nowait(EngineCoreOutputs(engine_index=core.engine_ranks_managed[0]))
    while not core.outputs_queue.empty():
        if engine.errored:
            raise engine.dead_error
        await asyncio.sleep(0)


def tokens_made(engine: Any) -> dict[str, int]:
    """Tokens made so far by each unfinished request of ``engine``, by the request id that ``generate`` was given."""
    states = engine.output_processor.request_states.values()
    return {
        state.external_req_id: state.detokenizer.num_output_tokens()
        for state in states
        if state.detokenizer is not None
    }
