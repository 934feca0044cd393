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
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.utils.model import compute_position_id_with_mask

from recipe.partial_rollout.manager.types import SampleOutput, TakenGroup

_LIST_FIELDS = ("turn_scores", "tool_rewards")


def _padded(rows: Sequence[np.ndarray], width: int, fill: float, dtype: torch.dtype, *, left: bool) -> torch.Tensor:
    """[len(rows), width]: each row at the left end (padded on the left: at the right end), ``fill`` elsewhere."""
    result = torch.full((len(rows), width), fill, dtype=dtype)
    for i, row in enumerate(rows):
        if len(row) > width:
            raise RuntimeError(f"row {i} of the batch has {len(row)} tokens, the width is {width}")
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
    scores = [o.reward_score for o in outputs]
    if all(score is not None for score in scores):
        rm_scores = torch.zeros(len(outputs), response_length)
        last = torch.tensor([max(o.response_length, 1) - 1 for o in outputs])
        rm_scores[torch.arange(len(outputs)), last] = torch.tensor(scores, dtype=torch.float32)
        fields["rm_scores"] = rm_scores
    return TensorDict(fields, batch_size=len(outputs))


def _objects(values: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = list(values)
    return array


def _non_tensors(groups: Sequence[TakenGroup], slot_uids: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    rows = [group.row for group in groups for _ in group.outputs]
    outputs = [output for group in groups for output in group.outputs]
    informed = [output for output in outputs if output.reward_extra_info]
    extra_keys = list(informed[0].reward_extra_info) if informed else []
    nothing = _mean_info(informed) if informed else {}
    fields = {key: _objects([row[key] for row in rows]) for key in groups[0].row}
    loop_keys = {key for output in outputs for key in output.extra_fields} | set(_LIST_FIELDS)
    fields.update({key: _objects([o.extra_fields.get(key) for o in outputs]) for key in sorted(loop_keys)})
    fields.update({key: np.array([(o.reward_extra_info or nothing)[key] for o in outputs]) for key in extra_keys})
    fields["uid"] = _objects([uid for uid, group in zip(slot_uids, groups, strict=True) for _ in group.outputs])
    fields["__num_turns__"] = np.array([o.num_turns for o in outputs], dtype=np.int32)
    fields["multi_modal_inputs"] = _objects([{} for _ in outputs])
    return fields, extra_keys


def filled_in(outputs: Sequence[SampleOutput]) -> tuple[SampleOutput, ...]:
    """``outputs`` of a group, in which masked ones get their siblings' prompt and mean reward.

    A masked sample has no token in the loss, and with the mean of the others as its reward it does not change the
    group's baseline. A group with only masked samples gets reward 0 throughout, so no advantage.
    """
    good = [output for output in outputs if not output.masked]
    if len(good) == len(outputs):
        return tuple(outputs)
    if not good:
        prompt = next((o.prompt_ids for o in outputs if len(o.prompt_ids)), np.zeros(1, np.int32))
        return tuple(replace(output, prompt_ids=prompt, reward_score=0.0) for output in outputs)
    scores = [output.reward_score for output in good]
    mean = None if None in scores else float(np.mean(scores))  # type: ignore[arg-type]
    stand_in = {"prompt_ids": good[0].prompt_ids, "reward_score": mean, "reward_extra_info": _mean_info(good)}
    return tuple(replace(output, **stand_in) if output.masked else output for output in outputs)


def _mean_info(outputs: Sequence[SampleOutput]) -> dict[str, Any]:
    """The reward's extra information for a masked sample: the mean of its siblings' numbers, the first of anything else."""
    infos = [output.reward_extra_info for output in outputs]
    return {
        key: float(np.mean([info[key] for info in infos])) if isinstance(value, bool | int | float) else value
        for key, value in infos[0].items()
    }


def assemble_batch(
    groups: Sequence[TakenGroup], slot_uids: Sequence[str], prompt_length: int, response_length: int, pad_id: int
) -> DataProto:
    """The training batch of ``groups``, in their order.

    Args:
        slot_uids: one per group, as verl's ``fit`` named its slots.
        prompt_length: P, tokens. response_length: R, tokens. pad_id: token id of the padding.

    Raises:
        RuntimeError: a sample is longer than its width, or a group lacks an output.
    """
    sizes = {len(group.outputs) for group in groups}
    if len(sizes) != 1:
        raise RuntimeError(f"groups of a batch have {sorted(sizes)} outputs; all must have rollout.n")
    groups = [replace(group, outputs=filled_in(group.outputs)) for group in groups]
    outputs = [output for group in groups for output in group.outputs]
    non_tensors, extra_keys = _non_tensors(groups, slot_uids)
    tensors = _tensors(outputs, prompt_length, response_length, pad_id)
    meta = {"reward_extra_keys": extra_keys} if "rm_scores" in tensors.keys() else {}  # noqa: SIM118
    return DataProto(batch=tensors, non_tensor_batch=non_tensors, meta_info=meta)


def fill_slots(
    groups: Sequence[TakenGroup], slots: DataProto, prompt_length: int, response_length: int, pad_id: int
) -> DataProto:
    """The batch of ``groups``; row i belongs to slot i // rollout.n.

    Args:
        slots: a row for each sample, as verl's ``fit`` passes them. The others: see ``assemble_batch``.
    """
    uids = list(slots.non_tensor_batch["uid"][:: len(groups[0].outputs)])
    batch = assemble_batch(groups, uids, prompt_length, response_length, pad_id)
    batch.meta_info["timing"] = _timings(groups)
    return batch


def _timings(groups: Sequence[TakenGroup]) -> dict[str, float]:
    """verl's ``agent_loop/*`` timings (seconds) over the samples of a batch."""
    timing: dict[str, float] = {}
    for key in ("generate_sequences", "tool_calls", "compute_score"):
        values = np.array([output.metrics.get(key, 0.0) for group in groups for output in group.outputs])
        for name, value in (("min", values.min()), ("max", values.max()), ("mean", values.mean())):
            timing[f"agent_loop/{key}/{name}"] = float(value)
    return timing
