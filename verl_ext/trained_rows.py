"""Patch: the statistics of a batch are those of the samples that train.

A row whose ``response_mask`` is all 0 trains nothing: its sample failed, or ``rollout_rs`` rejected it. verl lets its
reward count all the same, in the baseline of its group, in whitening, in the KL controller and in the logged means. Here
verl's functions get the other rows alone, and such a row has advantage 0.

Of a group that has lost all rows but one, that row has no baseline: verl would take its reward for its advantage. It has
advantage 0 too, where the estimator compares the samples of a group.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import wrapt

from verl_ext.guard import VERL, require

if TYPE_CHECKING:
    from verl.protocol import DataProto

_TARGET = "verl.trainer.ppo.ray_trainer"
_MEANS = ("compute_data_metrics", "compute_variance_proxy_metrics")


def trained_rows(data: DataProto) -> torch.Tensor:
    """bool [B]: rows of ``data`` with a token in the loss."""
    return data.batch["response_mask"].bool().any(dim=-1)


def _rows_with_advantage(data: DataProto, estimator: Any) -> torch.Tensor:
    """bool [B]: the trained rows but for lone survivors of a group, if ``estimator`` compares the samples of a group."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rows = trained_rows(data)
    if "index" not in inspect.signature(get_adv_estimator_fn(estimator)).parameters:
        return rows
    _, group, sizes = np.unique(data.non_tensor_batch["uid"].astype(str), return_inverse=True, return_counts=True)
    left = np.bincount(group, weights=rows.numpy(), minlength=len(sizes))
    return rows & torch.from_numpy((left > 1) | (left == sizes))[group]


def _patch(module: Any) -> None:
    if hasattr(module.compute_advantage, "__wrapped__"):
        return
    verls_advantage, verls_penalty = module.compute_advantage, module.apply_kl_penalty

    @functools.wraps(verls_advantage)
    def compute_advantage(data: DataProto, adv_estimator: Any, *args: Any, **kwargs: Any) -> DataProto:
        rows = _rows_with_advantage(data, adv_estimator)
        # PF-PPO draws the rows of the batch anew, by score.
        if rows.all() or (kwargs.get("config") or {}).get("use_pf_ppo"):
            return verls_advantage(data, adv_estimator, *args, **kwargs)
        keys = "advantages", "returns"
        data.batch.update({key: torch.zeros_like(data.batch["token_level_rewards"]) for key in keys})
        if rows.any():
            of_rows = verls_advantage(data.select_idxs(rows), adv_estimator, *args, **kwargs)
            for key in keys:
                data.batch[key][rows] = of_rows.batch[key]
        return data

    @functools.wraps(verls_penalty)
    def apply_kl_penalty(data: DataProto, *args: Any, **kwargs: Any) -> tuple[DataProto, dict[str, Any]]:
        rows = trained_rows(data)
        if rows.all() or not rows.any():
            return verls_penalty(data, *args, **kwargs)
        of_rows, metrics = verls_penalty(data.select_idxs(rows), *args, **kwargs)
        data.batch["token_level_rewards"] = data.batch["token_level_scores"].clone()
        data.batch["token_level_rewards"][rows] = of_rows.batch["token_level_rewards"]
        return data, metrics

    def of_trained(original: Any) -> Any:
        @functools.wraps(original)
        def means(batch: DataProto, *args: Any, **kwargs: Any) -> dict[str, Any]:
            rows = trained_rows(batch)
            return original(batch.select_idxs(rows) if rows.any() else batch, *args, **kwargs)

        return means

    verls_speculation = module.compute_spec_decode_metrics

    @functools.wraps(verls_speculation)
    def compute_spec_decode_metrics(drafts: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # A sample that failed, or whose every call a journal answered, has no counts.
        told = None if drafts is None else [each is not None for each in drafts]
        return verls_speculation(drafts, *args, **{"non_padding_mask": told, **kwargs})

    module.compute_advantage, module.apply_kl_penalty = compute_advantage, apply_kl_penalty
    module.compute_spec_decode_metrics = compute_spec_decode_metrics
    for name in _MEANS:
        setattr(module, name, of_trained(getattr(module, name)))


def install() -> None:
    require("verl", VERL, "trained_rows")
    wrapt.register_post_import_hook(_patch, _TARGET)
