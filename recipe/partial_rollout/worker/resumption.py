"""Sampling parameters across interruptions: a resumed call gets its earlier tokens as prompt, which vLLM does not count.

==============================  ======================================================================================
``max_tokens``, ``min_tokens``  reduced by the tokens already made
``stop``                        searched for in the text of the whole turn (``StopStrings``)
``seed``                        replaced by one derived from it and the number of tokens made: the engine's generator
                                restarts with every call and would draw the noise of the turn's first tokens again
``_REFUSED``                    refused: vLLM applies these to one call's output and cannot be told of earlier calls
everything else                 unchanged: it looks at one step, or at prompt and output alike (``repetition_penalty``)
==============================  ======================================================================================
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from recipe.partial_rollout.manager.types import Segment

_REFUSED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "bad_words": (None, []),
    "thinking_token_budget": (None,),
    "structured_outputs": (None,),
    "repetition_detection": (None,),
}
"""parameters that depend on a call's own output, with the values that switch each off"""


class SamplingError(ValueError):
    """A sampling parameter that would not survive an interruption."""


def check_sampling(sample_id: str, params: dict[str, Any], tokenizer: Any) -> None:
    """Raise ``SamplingError`` for a parameter that vLLM would apply anew after each interruption.

    Args:
        tokenizer: the worker's, None if it has none; stop strings need it.
    """
    if params.get("stop") and tokenizer is None:
        raise SamplingError(
            f"sample {sample_id}: its agent loop asks for stop={params['stop']!r}, and its worker has no tokenizer to "
            f"find stop strings with: use stop_token_ids"
        )
    for key, off in _REFUSED.items():
        if (value := params.get(key)) not in off:
            raise SamplingError(
                f"sample {sample_id}: its agent loop asks for {key}={value!r}, which vLLM applies to the tokens of one "
                f"call and not to those before an interruption: leave it out, or set partial_rollout.enable=False"
            )


def sampling_of_call(params: dict[str, Any], budget: int, made: int) -> dict[str, Any]:
    """Parameters of the call that continues a turn after ``made`` of ``budget`` tokens; ``params`` are the turn's."""
    params = {**params, "max_tokens": budget - made}
    if params.get("min_tokens"):
        params["min_tokens"] = max(0, params["min_tokens"] - made)
    if made and params.get("seed") not in (None, -1):
        params["seed"] = _seed_after(params["seed"], made)
    return params


def _seed_after(seed: int, made: int) -> int:
    """A 31-bit seed that differs from ``seed`` and for each ``made``; the same in every run."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {made}".encode(), digest_size=4).digest(), "big") >> 1


class StopStrings:
    """Finds stop strings in a whole turn, with vLLM's own detokenizer and search.

    The engine's detokenizer sees the tokens of one call and misses a stop string that begins before an interruption and
    ends after it. vLLM returns the token that completes a stop string, whether or not its text has the string
    (``include_stop_str_in_output``), so there the turn is cut. What a resumed call made after it is dropped.

    Args:
        tokenizer: the worker's. prompt_ids: of the turn. params: its sampling parameters, with ``stop``.
        turn: its segments so far.
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
        """The turn's next ``segment``, cut after the token that completes a stop string, if one does."""
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
