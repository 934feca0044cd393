"""Patch: estimators of the advantage compare samples, not rows. Under verl's v1 a sample may have several rows.

verl's v1 compares samples for ``grpo`` only. Its other estimators compare rows, so a sample with five rows has five
votes in the baseline of its group. Here an estimator gets each sample as one sequence: its rows one behind the other,
with the score once, on the last token that trains. So rows keep their advantage if the sample's last row trains nothing.
``gae`` stays as in verl: each row is a sequence that ends in the sample's score. The patch may go when verl compares
samples.

Example of two samples. The first has two rows, of two tokens and of one::

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
    """Return, for the rows with v1's ``keys`` (``{uid}_{sample}_{row}``), three arrays.

    They are the number of each row's sample [B], the row's place in its sample [B], and the rows of each sample [S].
    For ``["a_0_0", "a_0_1", "a_1_0"]`` they are ``[0, 0, 1]``, ``[0, 1, 0]`` and ``[2, 1]``.
    """
    samples, rows = zip(*[key.rsplit("_", 1) for key in keys], strict=True)
    _, owners, counts = np.unique(samples, return_inverse=True, return_counts=True)
    order = np.lexsort((np.array(rows, int), owners))
    places = np.empty(len(keys), int)
    places[order] = np.arange(len(keys)) - np.searchsorted(owners[order], owners[order])
    return owners, places, counts


def _joined(data: DataProto, owners: np.ndarray, places: np.ndarray, counts: np.ndarray) -> DataProto:
    """Join the rows [B, R] of each sample into one row [S, K * R], where K is the most rows that a sample has."""
    from verl.protocol import DataProto

    mask, scores = data.batch["response_mask"], data.batch["token_level_scores"]
    # Every row has the score of its sample; what else is in its rewards, such as a KL penalty, is its own.
    penalties = data.batch["token_level_rewards"] - scores
    joined = {}
    for name, values in {"response_mask": mask, "token_level_rewards": penalties}.items():
        whole = values.new_zeros(len(counts), max(counts), values.shape[1])
        whole[owners, places] = values
        joined[name] = whole.flatten(1)
    # On the last token that trains: ``reinforce_plus_plus`` carries no reward back from another one.
    trained, final = joined["response_mask"] > 0, np.flatnonzero(places == counts[owners] - 1)
    last = (trained * torch.arange(trained.shape[1])).argmax(dim=1)
    joined["token_level_rewards"][owners[final], last[owners[final]]] += scores[final].sum(dim=1)
    uids = data.non_tensor_batch["uid"][np.unique(owners, return_index=True)[1]]
    return DataProto.from_dict(joined, non_tensors={"uid": uids})


def patch(module: Any) -> None:
    """Let the trainer of ``module``, verl's v1, compare samples."""

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
