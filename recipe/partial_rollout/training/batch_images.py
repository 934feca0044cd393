"""Images in a batch of partial rollout: made again from the rows, once for all siblings that show the same.

verl's workers bring pixels with every sample. Here siblings share one dictionary, and what is pickled together has its
tensors once: a batch of 16 prompts with 8 samples each is an eighth of noPR's, in the driver and on its way to the trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from verl.protocol import DataProto

from recipe.partial_rollout.checkpoint.row_images import opened
from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.training.reward_info import objects
from recipe.partial_rollout.worker.pictures import Pictures


async def add_images(batch: DataProto, groups: Sequence[TakenGroup], pictures: Pictures) -> None:
    """Give ``batch``, assembled of ``groups``, the inputs and the positions of its images.

    ``multi_modal_inputs``: a dictionary a row (``Pictures.inputs``), empty where it shows none. ``position_ids``:
    [B, 4, P+R].
    """
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
    starts = accumulate((len(group.rows) for group in groups), initial=0)
    made = await asyncio.gather(*[_of_group(group, ids[start:], pictures) for group, start in zip(groups, starts)])  # noqa: B905
    inputs = [each for of_group in made for each in of_group]

    def positions() -> torch.Tensor:
        rows = zip(ids.split(1), mask.split(1), inputs, strict=True)
        return torch.cat([pictures.positions(*row) for row in rows])

    batch.batch["position_ids"] = await asyncio.to_thread(positions)
    for each in inputs:
        each.pop("mm_token_type_ids", None)
    batch.non_tensor_batch["multi_modal_inputs"] = objects(inputs)


async def _of_group(group: TakenGroup, ids: torch.Tensor, pictures: Pictures) -> list[dict[str, Any]]:
    """Inputs of each row of ``group``, whose tokens are the first of ``ids``; the same object for the same images."""
    own = await pictures.of_row(group.row) if any(output.images for output in group.rows) else []
    made: dict[tuple[int | bytes, ...], dict[str, Any]] = {}
    for output, row in zip(group.rows, ids.split(1), strict=False):
        if output.images not in made:
            shown = [own[each] if isinstance(each, int) else opened(each) for each in output.images]
            made[output.images] = await asyncio.to_thread(pictures.inputs, shown, row)
    return [made[output.images] for output in group.rows]
