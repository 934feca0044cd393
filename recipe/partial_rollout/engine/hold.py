"""Pause vLLM's engine while the weights change, with its requests in place (a hold), and optionally keep KV blocks.

An interruption ends every request, and each continues as a new request. A hold ends none: requests keep their seats and
their tokens, and continue after ``resume_generation``. Requests that arrive during a hold are accepted, and scheduled
then.

``pause`` returns when every token of the old weights is counted. The engine core answers once no step is in flight,
asynchronous scheduling included. It sends its answer after the tokens of the last step. Then ``pause`` waits until the
output processor has read these tokens.

verl's server names one version for a request: the one of the weights when it ends. So at each hold the server records
how many tokens every request has, and the version that made the last of them. ``version_marks`` of an answer are these
pairs:

    a request of 12 tokens, held after 5 under version 3, and after 9 under version 4, ends under version 5:
    [(5, 3), (9, 4)]  ->  tokens 0-4 by version 3, 5-8 by version 4, 9-11 by version 5

Once vLLM 0.31 is no longer supported, the marks and the wait for the output processor can be removed: vLLM 0.32 has
such spans itself (``AsyncLLM.update_weight_version``, a string; ``CompletionOutput.weight_versions``). The engine core
of 0.32 writes the version into each message of tokens, and after a pause with ``keep`` no token is in flight. So these
spans are right even if tokens are sent in pieces.

With ``resume_kv=recompute`` a hold also empties the KV cache. To do so, vLLM preempts the running requests: they queue
again in their order, and prefill prompt and tokens under the new weights. With ``keep`` they continue on the old
blocks.

vLLM's prefix cache also keeps the blocks of an aborted request, until it needs the space. If a weight sync does not
empty the cache, a resumed request finds its own blocks there and prefills at most one block of tokens again. Other
requests must not find blocks of older weights, so with ``keep`` every request carries a salt, which vLLM hashes into
its blocks. A training sample's salt is its group and the version of the sample's first token:

* siblings that start under the same weights prefill their prompt once;
* a resumed sample finds its own blocks, and those of siblings with its salt, whatever the present weights;
* a sibling that starts later has another salt, so it finds no blocks of older weights.

Everything else (validation) has the policy version as its salt. Without ``keep`` there are no salts: the cache is
emptied at each interruption and each weight sync.

With ``keep``, the tokens after a resumption are sampled from mixed policies: new weights over keys and values of old
ones. Their behaviour log-probs are the engine's own, so the decoupled loss stays correct; ``kv_gap_mean`` measures the
difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

UNKNOWN = -1
"""version of a server that knows none"""


Mark = tuple[int, int]
"""(tokens, version): ``version`` made the tokens of a request after the previous mark, up to ``tokens`` in all"""


class Span(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) of a request were made by ``version``."""

    start: int
    stop: int
    version: int


async def pause(engine: Any, *, clear_kv: bool) -> None:
    """Hold ``engine``, and return when its output processor has every token made so far. A second hold changes nothing.

    The encoder cache of a multimodal model is emptied, whatever ``clear_kv``.

    Args:
        engine: vLLM's ``AsyncLLM``.
        clear_kv: empty the KV cache, including the blocks of running requests and of KV connectors.

    Raises:
        EngineDeadError: the engine has died.
        RuntimeError: vLLM could not empty the cache, because a KV transfer is under way.
    """
    # All that ``pause_generation`` does beyond this is to sleep for 20 ms, so that outputs may be processed meanwhile.
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    await _all_processed(engine)
    if clear_kv:
        await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    if engine.model_config.is_multimodal_model:
        # The encoder cache holds outputs of the vision tower, whose weights change too. The cache of processed inputs
        # stays. It depends on no weights, and emptying it while requests arrive would make vLLM's front and core disagree.
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
    """Return the tokens made so far by each unfinished request of ``engine``, by the request id given to ``generate``."""
    states = engine.output_processor.request_states.values()
    return {
        state.external_req_id: state.detokenizer.num_output_tokens()
        for state in states
        if state.detokenizer is not None
    }


def record_marks(marks: Mapping[str, list[Mark]], made: Mapping[str, int], version: int | None) -> None:
    """Append (tokens so far, ``version``) to the marks of each request that has made tokens since its last mark.

    ``made`` has the tokens so far of each request. Requests that are not in ``marks`` are ignored.

    >>> marks = {"a": []}
    >>> record_marks(marks, {"a": 5, "of another": 7}, version=3)
    >>> record_marks(marks, {"a": 5}, version=4)
    >>> marks
    {'a': [(5, 3)]}
    """
    for request_id, own in marks.items():
        tokens = made.get(request_id, 0)
        # A request that made nothing since its last mark needs no new one: a span is never empty.
        if tokens > (own[-1][0] if own else 0):
            own.append((tokens, UNKNOWN if version is None else version))


def spans(tokens: int, marks: Sequence[Mark], version: int) -> list[Span]:
    """Divide a request's tokens by the versions that made them: at least one span, empty only without any token.

    >>> spans(12, [(5, 3), (9, 4)], version=5)
    [Span(start=0, stop=5, version=3), Span(start=5, stop=9, version=4), Span(start=9, stop=12, version=5)]
    >>> spans(5, [(5, 3)], version=4)
    [Span(start=0, stop=5, version=3)]

    Args:
        tokens: number of tokens of the request.
        marks: the request's marks in order, at most one for each hold.
        version: policy version of the engine when the request ended.

    Raises:
        RuntimeError: the marks do not ascend, or count more tokens than there are.
    """
    found: list[Span] = []
    for stop, made_by in [*marks, (tokens, version)]:
        start = found[-1].stop if found else 0
        if not start <= stop <= tokens:
            raise RuntimeError(f"version marks {list(marks)} do not fit a request of {tokens} tokens")
        if stop > start:
            found.append(Span(start, stop, made_by))
    return found or [Span(0, tokens, version)]


# -- KV blocks that are kept -------------------------------------------------------------------------------------------

_MARK = "@"


def request_id_of(group: str, first_version: int | None) -> str:
    """Make a new vLLM request id for an engine call of a sample of ``group``.

    Args:
        first_version: version of the weights that made the sample's first token; None if there is none, or if unknown.
    """
    return f"{group}{_MARK}{'' if first_version is None else first_version}{_MARK}{uuid4().hex}"


def salt_of(request_id: str, version: int | None) -> str:
    """Return a request's cache salt: requests share KV blocks only under the same one.

    ``version`` is that of the engine's weights now.
    """
    group, mark, call = request_id.partition(_MARK)
    if not mark:
        return f"version {version}"
    return f"group {group} begun {call.partition(_MARK)[0] or version}"
