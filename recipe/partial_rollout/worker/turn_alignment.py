"""Matches a finished sample's tokens to the engine calls that made them, so every trained token has its call's version.

A trained token must be the engine's in its place: a call whose prompt is all that the sequence has before some position,
token for token, made what follows there, up to and including this token. The order of calls does not matter. So an agent
loop may sample candidates beside each other and keep one, ask a judge in between, or mask a part of a turn; it may drop
the end of a turn, as verl does where one token both stops an answer and starts the next message (GLM's
``<|observation|>``). What it may not do is show the engine another context than the one that is trained.
Example, with ``O`` for the observation token::

    first call     prompt [u g A]                      made [x y O]
    second call    prompt [u g A x y O s e e A]        made [z U]
    response                     x y O s e e A z U     the O is the template's, not the model's
    mask                         1 1 0 0 0 0 0 1 1
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from recipe.partial_rollout.manager.policies import plain
from recipe.partial_rollout.manager.types import SampleOutput
from recipe.partial_rollout.worker.live_sample import LiveSample, Turn, context_hash


def sample_output(sample: LiveSample, output: AgentLoopOutput, vocabulary: int) -> SampleOutput:
    """``output`` of an agent loop with the policy version and the engine's log-prob of every token, unpadded.

    Args:
        vocabulary: token ids that the model can read.

    Raises:
        RuntimeError: the generated tokens of ``output``, or the log-probs that it gives them, are not the engine's; or the
            trainer could not read them.
    """
    tokens = {*output.prompt_ids, *output.response_ids}
    if unknown := [token for token in tokens if not 0 <= token < vocabulary]:
        raise _refusal(sample, f"token {unknown[0]}, and the model knows those from 0 to {vocabulary - 1}")
    if odd := {*output.response_mask} - {0, 1}:
        raise _refusal(sample, f"a mask with {odd.pop()}, which is neither 0 nor 1")
    prompt_ids = np.asarray(output.prompt_ids, dtype=np.int32)
    response_ids = np.asarray(output.response_ids, dtype=np.int32)
    mask = np.asarray(output.response_mask, dtype=np.int8)
    if mask.shape != response_ids.shape:
        raise _refusal(sample, f"{len(response_ids)} tokens with a mask of {len(mask)}")
    given = None
    if output.response_logprobs is not None:
        given = np.asarray(output.response_logprobs, dtype=np.float32)
        if given.shape != response_ids.shape:
            raise _refusal(sample, f"{len(response_ids)} tokens with {len(given)} log-probs")
    versions, log_probs = _align(sample, prompt_ids, response_ids, mask.astype(bool), given)
    extra = dict(output.extra_fields)
    counts = {
        "calls_replayed": sample.calls_replayed,
        "calls_asked": sample.calls_asked,
        "untrained_tokens": sample.decoded - int(mask.sum()),
    }
    return SampleOutput(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=mask,
        log_probs=log_probs,
        versions=versions,
        segments=len(sample.segments),
        reward_score=plain(output.reward_score),
        reward_extra_info={key: plain(value) for key, value in (extra.pop("reward_extra_info", None) or {}).items()},
        num_turns=output.num_turns,
        metrics={**output.metrics.model_dump(), **counts},
        extra_fields=extra,
    )


def _align(
    sample: LiveSample,
    prompt_ids: np.ndarray,
    response_ids: np.ndarray,
    generated: np.ndarray,
    given: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Versions (int32) and the engine's log-probs (float32) of the response, both [R]; -1 and 0 for tokens not generated.

    Where several calls made a token in its place, the log-probs that the loop has ``given`` [R] decide, then the longer
    prompt, then the order of calls.
    """
    versions = np.full(len(response_ids), -1, np.int32)
    log_probs = np.zeros(len(response_ids), np.float32)
    made, known = np.zeros((2, len(response_ids)), bool)
    for turn, start, length in _in_place(sample.turns, prompt_ids, response_ids):
        place, engines = slice(start, start + length), turn.log_probs[:length]
        fits = generated[place] if given is None else generated[place] & (given[place] == engines)
        versions[place][fits], log_probs[place][fits] = turn.versions[:length][fits], engines[fits]
        made[place] = True
        known[place] |= fits
    if (unmade := generated & ~made).any():
        raise _refusal(sample, _whose(sample.turns, response_ids, unmade))
    if not known[generated].all():
        raise _refusal(sample, "log-probs that are not the engine's")
    return versions, log_probs


def _in_place(turns: list[Turn], prompt_ids: np.ndarray, response_ids: np.ndarray) -> Iterator[tuple[Turn, int, int]]:
    """Turns that answered what the sequence has before them: where in the response they start, and how many of their
    first tokens stand there. Shorter prompts first; of equal ones the call that began last."""
    whole, read, context = np.concatenate([prompt_ids, response_ids]), 0, context_hash()
    for turn in sorted(turns, key=lambda turn: (turn.start, -turn.number)):
        if turn.given_up or not len(prompt_ids) <= turn.start < len(whole):
            continue
        context.update(whole[read : turn.start].tobytes())
        read = turn.start
        if context.digest() != turn.context:
            continue
        here = whole[turn.start : turn.start + len(turn)]
        same = turn.token_ids[: len(here)] == here
        yield turn, turn.start - len(prompt_ids), len(here) if same.all() else int(same.argmin())


def _whose(turns: list[Turn], response_ids: np.ndarray, unmade: np.ndarray) -> str:
    """What is wrong with the first of the generated tokens that no call ``made`` in its place."""
    first = int(unmade.argmax())
    last = first + int(np.append(unmade[first:], False).argmin())
    tokens = response_ids[first:last].tolist()
    for turn in turns:
        if len(turn) and tokens[: len(turn)] == turn.token_ids[: len(tokens)].tolist():
            return (
                f"{len(tokens)} tokens that engine call {turn.number} made after another context (of {turn.start} tokens) "
                f"than they stand in: a loop may not rewrite, cut or summarise the context that is trained"
            )
    return f"{int(unmade.sum())} tokens as generated that no engine call made"


def _refusal(sample: LiveSample, what: str) -> RuntimeError:
    return RuntimeError(
        f"sample {sample.id}: its agent loop returned {what}; partial rollout needs agent loops that pass the engine's "
        f"tokens and log-probs through unchanged, or drop the end of a turn"
    )
