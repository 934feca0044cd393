"""Fills verl's empty batch slots with the groups that a batch trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl.protocol import DataProto

from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.rollout import metrics
from recipe.partial_rollout.rollout.batch import assemble_batch

if TYPE_CHECKING:
    from recipe.partial_rollout.rollout.rollout_context import RolloutContext


def fill_slots(context: RolloutContext, groups: Sequence[TakenGroup], slots: DataProto) -> DataProto:
    """The batch of ``groups``; row i belongs to slot i // rollout.n.

    Args:
        groups: with their outputs. slots: a row for each sample, as verl's ``fit`` passes them.
    """
    uids = list(slots.non_tensor_batch["uid"][:: context.settings.samples_per_group])
    batch = assemble_batch(groups, uids, context.sizes.prompt, context.sizes.response, context.pad_id)
    batch.meta_info["timing"] = metrics.timing_metrics(groups)
    return batch
