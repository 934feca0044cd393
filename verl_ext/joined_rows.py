"""Patch: advantages compare samples, whatever number of rows each has; v1 alone has several.

verl's v1 does so for ``grpo``, and has other estimators compare rows: a sample that compacts often has as many votes in the
baseline of its group. Here an estimator gets each sample as one sequence, its rows behind each other, with the score once,
at the end. Where the last row of a sample trains nothing, its other rows keep their advantage. ``gae`` stays verl's: each
row is a sequence that ends in the sample's score. It may go when verl compares samples.

Example of two samples, the first of rows with two tokens and one::

    rows      a [1 1 -]   b [1 - -]   c [1 1 1]        (mask, width 3)
    joined    a b [1 1 - 1 - -]   c [1 1 1 - - -]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl_ext.guard import around

if TYPE_CHECKING:
    from verl.protocol import DataProto


def _places(keys: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of rows with v1's ``keys`` (``{uid}_{sample}_{row}``): number of the sample [B], of the row in it [B]; rows [S]."""
    samples, rows = zip(*[key.rsplit("_", 1) for key in keys], strict=True)
    _, owners, counts = np.unique(samples, return_inverse=True, return_counts=True)
    order = np.lexsort((np.array(rows, int), owners))
    places = np.empty(len(keys), int)
    places[order] = np.arange(len(keys)) - np.searchsorted(owners[order], owners[order])
    return owners, places, counts


def _joined(data: DataProto, owners: np.ndarray, places: np.ndarray, counts: np.ndarray) -> DataProto:
    """The samples [S, K * R] of rows [B, R], of which a sample has at most K."""
    from verl.protocol import DataProto

    mask, rewards = data.batch["response_mask"], data.batch["token_level_rewards"]
    # Every row has the score of its sample; what else is in its rewards, such as a KL penalty, is its own.
    earlier = torch.from_numpy(places < counts[owners] - 1)[:, None]
    rewards = torch.where(earlier, rewards - data.batch["token_level_scores"], rewards)
    joined = {}
    for name, values in {"response_mask": mask, "token_level_rewards": rewards}.items():
        whole = values.new_zeros(len(counts), max(counts), values.shape[1])
        whole[owners, places] = values
        joined[name] = whole.flatten(1)
    uids = data.non_tensor_batch["uid"][np.unique(owners, return_index=True)[1]]
    return DataProto.from_dict(joined, non_tensors={"uid": uids})


def patch(module: Any) -> None:
    """The trainer of ``module``, verl's v1, compares samples."""

    @around(module, "compute_advantage_for_multi_trajectories")
    def compute_advantage_for_multi_trajectories(
        verls: Any, data: DataProto, batch_keys: list[str], adv_estimator: Any, **how: Any
    ) -> DataProto:
        owners, places, counts = _places(batch_keys)
        if max(counts) == 1 or adv_estimator == "gae":
            return verls(data, batch_keys, adv_estimator, **how)
        joined = _joined(data, owners, places, counts)
        found = verls(joined, [f"sample_{i}_0" for i in range(len(counts))], adv_estimator, **how)
        width = data.batch["response_mask"].shape[1]
        for name in ("advantages", "returns"):
            data.batch[name] = found.batch[name].unflatten(1, (-1, width))[owners, places]
        return data
