"""Rows that an agent loop returns under verl's worker: which of them fit a batch, and what all batches have alike.

verl joins the batches of its workers, which must have the same columns. Two samples may have different fields.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.tokenizer.tokenizer import get_processor_token_id

from recipe.partial_rollout.checkpoint.row_images import listed
from recipe.partial_rollout.worker.rewards import REWARD_INFO

ROW = "__row__"
"""column of a batch under v1: number of the row in its sample, from 0"""
LOOP_FIELDS = "__loop_fields__"
"""column of a worker's batch: the fields that each row's agent loop added"""
_EVERY_ROWS = {"raw_prompt", "turn_scores", "tool_rewards", "min_global_steps", "max_global_steps", "extras"}
"""fields of a loop that verl gives every row"""


def rows_of(returned: Any, *, several: bool) -> list[AgentLoopOutput]:
    """Return what an agent loop ``returned`` as a list; ``several``: a sample may have several rows.

    Raises:
        TypeError: it is not an ``AgentLoopOutput`` or a list of them, the list is empty, or it is a list and ``several``
            is False.
    """
    if isinstance(returned, AgentLoopOutput):
        return [returned]
    if not isinstance(returned, list) or not all(isinstance(each, AgentLoopOutput) for each in returned):
        what = f"a list of {type(returned[-1]).__name__}" if isinstance(returned, list) else type(returned).__name__
        raise TypeError(f"the agent loop returned {what}: it must return an AgentLoopOutput")
    if not returned:
        raise TypeError("the agent loop returned an empty list: return at least one output, whose mask may be all 0")
    if not several:
        what = f"a list of {len(returned)} outputs"
        raise TypeError(f"the agent loop returned {what}: only trainer.use_v1=True trains several rows of a sample")
    return returned


def placeholders(processor: Any) -> set[int]:
    """Tokens that stand for an image or a video, in models for which verl computes positions of them."""
    if not hasattr(processor, "get_rope_index"):
        return set()
    return {token for kind in ("image", "video") if (token := get_processor_token_id(processor, kind)) is not None}


def misfit(
    output: AgentLoopOutput,
    vocabulary: int,
    rollout: Any,
    *,
    media: Collection[int] = (),
    needs_log_probs: bool = False,
) -> str | None:
    """Describe what keeps ``output``, a row of an agent loop, out of a batch; None: nothing.

    verl would train some of it in silence: it pads a mask that is too short with the id of the padding token, which
    becomes the weight of a token in the loss.

    Args:
        vocabulary: number of token ids that the model knows.
        rollout: verl's section, which has the limits of prompts and responses.
        media: ``placeholders`` of the model.
        needs_log_probs: whether a row that trains tokens must have log-probs, because ``rollout_correction`` reads them.
            Where one row lacks them, verl breaks, or trains the whole batch without the correction.
    """
    prompt, response, log_probs = len(output.prompt_ids), len(output.response_ids), output.response_logprobs
    if prompt > rollout.prompt_length:
        return f"a prompt of {prompt} tokens (actor_rollout_ref.rollout.prompt_length={rollout.prompt_length})"
    if response > rollout.response_length:
        return f"a response of {response} tokens (actor_rollout_ref.rollout.response_length={rollout.response_length})"
    tokens = {*output.prompt_ids, *output.response_ids}
    if unknown := [token for token in tokens if not 0 <= token < vocabulary]:
        return f"token {unknown[0]}, but the model's tokens are 0 to {vocabulary - 1}"
    if (stray := tokens.intersection(media)) and not _shows(output):
        return f"token {stray.pop()}, which stands for an image or a video, but shows none: a text may contain it"
    if odd := {*output.response_mask} - {0, 1}:
        return f"a mask with {odd.pop()}, which is neither 0 nor 1"
    if len(output.response_mask) != response:
        return f"{response} tokens with a mask of {len(output.response_mask)}"
    # An empty list says that there are none, as in verl's own loops.
    if not log_probs and needs_log_probs and any(output.response_mask):
        return f"{response} tokens without the log-probs that algorithm.rollout_correction reads"
    if log_probs and len(log_probs) != response:
        return f"{response} tokens with {len(log_probs)} log-probs"
    if log_probs and np.isnan(np.asarray(log_probs, dtype=np.float32)).any():
        return "a log-prob that is no number"
    if not isinstance(output.num_turns, int | np.integer):
        return f"num_turns={output.num_turns!r:.60}, which is no integer"
    return None


def _shows(output: AgentLoopOutput) -> bool:
    """Whether ``output`` has an image or a video."""
    data = output.multi_modal_data or {}
    return any(each is not None for kind in ("images", "videos") for each in listed(data.get(kind)))


def unified(rows: Sequence[Any], validate: bool) -> dict[str, np.ndarray]:
    """Leave in ``rows`` of a worker only what verl can join with those of other workers; change them in place.

    A validation reads neither log-probs nor routed experts, and a failed sample has none.

    Returns:
        A column with the dictionaries of the rewards, and one with the fields that the agent loops added.
    """
    # verl takes the log-probs of all rows or of none.
    if validate or any(each.response_logprobs is None for each in rows):
        for each in rows:
            each.response_logprobs = None
    if validate:
        for each in rows:
            each.routed_experts = None
    infos, fields = np.empty((2, len(rows)), dtype=object)
    infos[:] = [each.extra_fields.pop(REWARD_INFO, None) or {} for each in rows]
    for i, each in enumerate(rows):
        own = [name for name in each.extra_fields if name not in _EVERY_ROWS]
        fields[i] = {name: each.extra_fields.pop(name) for name in own}
    return {REWARD_INFO: infos, LOOP_FIELDS: fields}
