"""Assembles finished groups into verl's ``DataProto``; padding happens here and nowhere earlier.

The batch contract under PR (B = groups * samples, P = rollout.prompt_length, R = rollout.response_length):

================== ========= ======= ==========================================================================
tensor             shape     dtype   content
================== ========= ======= ==========================================================================
prompts            [B, P]    int64   left-padded
responses          [B, R]    int64   right-padded, generated and tool tokens
response_mask      [B, R]    int64   1 where the model generated the token
input_ids          [B, P+R]  int64   prompts then responses
attention_mask     [B, P+R]  int64   1 where there is a token
position_ids       [B, P+R]  int64   as verl's ``compute_position_id_with_mask``
rollout_log_probs  [B, R]    float32 under the version that sampled each token; 0 elsewhere
rollout_versions   [B, R]    int32   policy version of each generated token; -1 elsewhere
rm_scores          [B, R]    float32 the score at the last token (absent when a reward model scores later)
================== ========= ======= ==========================================================================

Non-tensor fields: those of the dataset row, ``uid`` (the slot's, so that verl's advantage estimators group by it),
``__num_turns__``, ``multi_modal_inputs`` (empty), the reward's extra information and the agent loop's extra fields.
Rows of a group are adjacent. verl's trainer reads everything but ``rollout_versions``, which is for metrics and losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.utils.model import compute_position_id_with_mask

from recipe.partial_rollout.manager.policies import excess_of, masked_output
from recipe.partial_rollout.manager.types import SampleOutput, Segment, TakenGroup
from recipe.partial_rollout.training.reward_info import info_columns, objects

_LIST_FIELDS = ("turn_scores", "tool_rewards")


def _padded(rows: Sequence[np.ndarray], width: int, fill: float, dtype: torch.dtype, *, left: bool) -> torch.Tensor:
    """[len(rows), width]: each row at the left end (padded on the left: at the right end), ``fill`` elsewhere."""
    result = torch.full((len(rows), width), fill, dtype=dtype)
    for i, row in enumerate(rows):
        if len(row):
            start = width - len(row) if left else 0
            result[i, start : start + len(row)] = torch.from_numpy(np.ascontiguousarray(row)).to(dtype)
    return result


def _tensors(outputs: Sequence[SampleOutput], prompt_length: int, response_length: int, pad_id: int) -> TensorDict:
    prompts = _padded([o.prompt_ids for o in outputs], prompt_length, pad_id, torch.int64, left=True)
    responses = _padded([o.response_ids for o in outputs], response_length, pad_id, torch.int64, left=False)
    ones = np.ones(max(prompt_length, response_length), dtype=np.int64)
    attention_mask = torch.cat(
        [
            _padded([ones[: len(o.prompt_ids)] for o in outputs], prompt_length, 0, torch.int64, left=True),
            _padded([ones[: o.response_length] for o in outputs], response_length, 0, torch.int64, left=False),
        ],
        dim=1,
    )
    fields = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": _padded([o.response_mask for o in outputs], response_length, 0, torch.int64, left=False),
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_id_with_mask(attention_mask),
        "rollout_log_probs": _padded([o.log_probs for o in outputs], response_length, 0, torch.float32, left=False),
        "rollout_versions": _padded([o.versions for o in outputs], response_length, -1, torch.int32, left=False),
    }
    if all(o.masked or o.reward_score is not None for o in outputs):
        rm_scores = torch.zeros(len(outputs), response_length)
        last = torch.tensor([max(o.response_length, 1) - 1 for o in outputs])
        scores = torch.tensor([o.reward_score or 0.0 for o in outputs], dtype=torch.float32)
        rm_scores[torch.arange(len(outputs)), last] = scores
        fields["rm_scores"] = rm_scores
    return TensorDict(fields, batch_size=len(outputs))


def _non_tensors(groups: Sequence[TakenGroup], slot_uids: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    rows = [group.row for group in groups for _ in group.outputs]
    outputs = [output for group in groups for output in group.outputs]
    infos = info_columns([output.reward_extra_info for output in outputs])
    # A reward model that scores the batch may write into a sample's row, which is its own.
    fields = {key: objects([deepcopy(row[key]) for row in rows]) for key in groups[0].row}
    loop_keys = {key for output in outputs for key in output.extra_fields} | set(_LIST_FIELDS)
    fields.update({key: objects([o.extra_fields.get(key) for o in outputs]) for key in sorted(loop_keys)})
    fields.update(infos)
    fields["uid"] = objects([uid for uid, group in zip(slot_uids, groups, strict=True) for _ in group.outputs])
    fields["__num_turns__"] = np.array([o.num_turns for o in outputs], dtype=np.int32)
    fields["multi_modal_inputs"] = objects([{} for _ in outputs])
    return fields, list(infos)


def _fitted(outputs: Sequence[SampleOutput], prompt_length: int, response_length: int) -> tuple[SampleOutput, ...]:
    """``outputs`` of a group as the batch holds them: masked ones with a sibling's prompt, cut to the width.

    The turns of a sample that failed may have made more tokens than a response holds. A sample that did not fail and is
    too long can only come from a checkpoint: workers refuse it. It is masked here.
    """
    prompts = [output.prompt_ids for output in outputs if 0 < len(output.prompt_ids) <= prompt_length]
    prompt = prompts[0] if prompts else np.zeros(1, np.int32)

    def fitted(output: SampleOutput) -> SampleOutput:
        excess = excess_of(len(output.prompt_ids), output.response_length, prompt_length, response_length)
        if excess is None and not output.masked:
            return output
        kept = output.response_ids[:response_length]
        error = output.extra_fields.get("sample_error", excess)
        instead = masked_output([Segment(kept, np.zeros(len(kept), np.float32), -1)], error)
        return replace(instead, prompt_ids=prompt, segments=output.segments)

    return tuple(map(fitted, outputs))


def assemble_batch(
    groups: Sequence[TakenGroup], slot_uids: Sequence[str], prompt_length: int, response_length: int, pad_id: int
) -> DataProto:
    """The training batch of ``groups``, in their order.

    Args:
        slot_uids: one per group, as verl's ``fit`` named its slots.
        prompt_length: P, tokens. response_length: R, tokens. pad_id: token id of the padding.

    Raises:
        RuntimeError: a group lacks an output.
    """
    sizes = {len(group.outputs) for group in groups}
    if len(sizes) != 1:
        raise RuntimeError(f"groups of a batch have {sorted(sizes)} outputs; all must have rollout.n")
    groups = [replace(g, outputs=_fitted(g.outputs, prompt_length, response_length)) for g in groups]
    outputs = [output for group in groups for output in group.outputs]
    non_tensors, extra_keys = _non_tensors(groups, slot_uids)
    tensors = _tensors(outputs, prompt_length, response_length, pad_id)
    meta = {"reward_extra_keys": extra_keys} if "rm_scores" in tensors.keys() else {}  # noqa: SIM118
    return DataProto(batch=tensors, non_tensor_batch=non_tensors, meta_info=meta)
