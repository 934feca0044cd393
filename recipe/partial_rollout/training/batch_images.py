"""Images of a PR batch: pixels are made from the dataset rows, once for all siblings that show them.

verl's workers send pixels with every sample. Here siblings share one dictionary, and pickle stores a shared tensor
once. With 8 samples a prompt, the pixels of a batch take an eighth of noPR's memory, in the driver and on the way to
the trainer.
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
    """Return the image inputs of each row of ``group``. Rows with the same images get the same dictionary.

    Args:
        ids: input ids, [rows, P+R]. The group's rows come first; rows of later groups may follow.
    """
    own = await pictures.of_row(group.row) if any(output.images for output in group.rows) else []
    made: dict[tuple[int | bytes, ...], dict[str, Any]] = {}
    for output, row in zip(group.rows, ids.split(1), strict=False):
        if output.images not in made:
            shown = [own[each] if isinstance(each, int) else opened(each) for each in output.images]
            made[output.images] = await asyncio.to_thread(pictures.inputs, shown, row)
    return [made[output.images] for output in group.rows]
