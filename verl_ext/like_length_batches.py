"""Patch: dynamic micro-batches that are padded hold responses of like length.

Without packing (``use_remove_padding=False``, as on the CPU and wherever flash-attn is missing) a micro-batch is padded to
its longest sequence. verl's dynamic micro-batches mix long and short on purpose (they balance packed work): on the CPU
three quarters of the work are padding then, and on a GPU it may not fit the memory. Here a micro-batch takes neighbours in
length and its budget, ``max_token_len_per_gpu``, counts padded tokens. Packed micro-batches stay verl's own. It may go when
verl balances padded micro-batches by length.
"""

from typing import Any

import torch


def partition_by_length(lengths: list[int], max_padded_tokens: int) -> list[list[int]]:
    """Indices of ``lengths`` (tokens) in groups of like length, longest group first.

    Each group's size times its longest member is at most ``max_padded_tokens``.

    Raises:
        ValueError: one sequence alone is over the budget.
    """
    if lengths and max(lengths) > max_padded_tokens:
        raise ValueError(
            f"ppo_max_token_len_per_gpu={max_padded_tokens} is below the longest sequence ({max(lengths)} tokens): "
            f"raise it to at least max_prompt_length + max_response_length"
        )
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * longest <= max_padded_tokens:
            groups[-1].append(index)
        else:
            longest = lengths[index]
            groups.append([index])
    return groups


def _match_count(groups: list[list[int]], count: int) -> list[list[int]]:
    """Split the largest groups until there are ``count``, so that every rank runs as many collectives."""
    while len(groups) < count:
        largest = max(groups, key=len)
        if len(largest) == 1:
            raise ValueError(f"cannot make {count} micro-batches of {len(groups)} sequences")
        groups.remove(largest)
        half = len(largest) // 2
        groups += [largest[:half], largest[half:]]
    return groups


def patch(module: Any) -> None:
    """Give ``module.prepare_micro_batches`` a way of its own for padded dynamic micro-batches."""
    original = module.prepare_micro_batches
    from verl.utils import tensordict_utils as tu
    from verl.utils.device import get_device_name

    def prepare_micro_batches(data, dp_group=None, **kwargs):
        dynamic = tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True)
        if not dynamic or tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True):
            return original(data=data, dp_group=dp_group, **kwargs)
        lengths = data["input_ids"].offsets().diff().tolist()
        groups = partition_by_length(lengths, int(data["max_token_len_per_gpu"]))
        if dp_group is not None and torch.distributed.get_world_size(dp_group) > 1:
            count = torch.tensor(len(groups), device=get_device_name())
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=dp_group)
            groups = _match_count(groups, int(count))
        return [tu.index_select_tensor_dict(data, group) for group in groups], groups

    module.prepare_micro_batches = prepare_micro_batches
