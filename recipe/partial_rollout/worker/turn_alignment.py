"""Matches a finished sample's tokens to the engine calls that made them, so every trained token has its call's version.

An agent loop may drop the end of a turn: if one token both stops an answer and starts the next message, as GLM's
``<|observation|>`` does, verl trims it. Turns are matched by position, never by a search for tokens. A turn starts in the
response where the prompt of its engine call ended, and reaches to the start of the next turn. In between, the tokens that
the mask marks as generated must be the first tokens of the turn, with the engine's log-probs; otherwise the sample fails.
Example, with ``O`` for the observation token::

    first call     prompt [u g A]                      made [x y O]
    second call    prompt [u g A x y O s e e A]        made [z U]
    response                     x y O s e e A z U     the O is the template's, not the model's
    mask                         1 1 0 0 0 0 0 1 1
"""

from __future__ import annotations

from typing import Any

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from recipe.partial_rollout.manager.types import SampleOutput
from recipe.partial_rollout.worker.live_sample import LiveSample


def sample_output(sample: LiveSample, output: AgentLoopOutput) -> SampleOutput:
    """``output`` of an agent loop with the policy version and the engine's log-prob of every token, unpadded.

    Raises:
        RuntimeError: the generated tokens of ``output``, or the log-probs that it gives them, are not the engine's.
    """
    response_ids = np.asarray(output.response_ids, dtype=np.int32)
    mask = np.asarray(output.response_mask, dtype=np.int8)
    if mask.shape != response_ids.shape:
        raise _refusal(sample, f"{len(response_ids)} tokens with a mask of {len(mask)}")
    versions, log_probs = _align(sample, len(output.prompt_ids), response_ids, mask.astype(bool))
    if output.response_logprobs is not None:
        _check_log_probs(sample, np.asarray(output.response_logprobs, dtype=np.float32), log_probs, mask.astype(bool))
    extra = dict(output.extra_fields)
    answered = {"calls_replayed": sample.calls_replayed, "calls_asked": sample.calls_asked}
    return SampleOutput(
        prompt_ids=np.asarray(output.prompt_ids, dtype=np.int32),
        response_ids=response_ids,
        response_mask=mask,
        log_probs=log_probs,
        versions=versions,
        segments=len(sample.segments),
        reward_score=_plain(output.reward_score),
        reward_extra_info={key: _plain(value) for key, value in extra.pop("reward_extra_info", {}).items()},
        num_turns=output.num_turns,
        metrics={**output.metrics.model_dump(), **answered},
        extra_fields=extra,
    )


def _plain(value: Any) -> Any:
    """A number as a plain Python one: verl's dapo reward manager returns tensors, which cannot be checkpointed."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _align(
    sample: LiveSample, prompt_length: int, response_ids: np.ndarray, generated: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Versions (int32) and the engine's log-probs (float32) of the response, both [R]; -1 and 0 for tokens not generated.

    It goes backwards, because the prompt of a later call shows which tokens of earlier turns the conversation kept.
    """
    versions = np.full(len(response_ids), -1, np.int32)
    log_probs = np.zeros(len(response_ids), np.float32)
    end = len(response_ids)
    for number, turn in reversed(list(enumerate(sample.turns))):
        start = turn.start - prompt_length
        if start < 0:
            raise _refusal(sample, f"a prompt of {prompt_length} tokens, where turn {number} started at {turn.start}")
        if start >= end or not len(turn):
            continue
        kept = int(generated[start:end].sum())
        place = slice(start, start + kept)
        if not (generated[place].all() and np.array_equal(response_ids[place], turn.token_ids[:kept])):
            raise _refusal(
                sample, f"{kept} generated tokens for turn {number} that are not the front of its {len(turn)}"
            )
        versions[place], log_probs[place] = turn.versions[:kept], turn.log_probs[:kept]
        end = start
    if generated[:end].any():
        raise _refusal(sample, f"{int(generated[:end].sum())} tokens as generated that no engine call made")
    return versions, log_probs


def _check_log_probs(sample: LiveSample, given: np.ndarray, engines: np.ndarray, generated: np.ndarray) -> None:
    if given.shape != engines.shape or not np.array_equal(given[generated], engines[generated]):
        raise _refusal(sample, "log-probs that are not the engine's")


def _refusal(sample: LiveSample, what: str) -> RuntimeError:
    return RuntimeError(
        f"sample {sample.id}: its agent loop returned {what}; partial rollout needs agent loops that pass the engine's "
        f"tokens and log-probs through unchanged, or drop the end of a turn"
    )
