"""Patch: the statistics of a batch count only the rows that train.

A row whose ``response_mask`` is all 0 trains nothing: its sample failed, or ``rollout_rs`` rejected it. verl lets its
reward count all the same, in the baseline of its group, in whitening, in the KL controller and in the logged means.
Here verl's functions get the other rows alone, and such a row has advantage 0.

If all rows of a group but one train nothing, the one has no baseline, and verl would take its reward for its advantage.
Here it has advantage 0 too, if the estimator compares the samples of a group. It may go when verl leaves such rows out.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl_ext.guard import around

if TYPE_CHECKING:
    from verl.protocol import DataProto

_CALLED_BY_NAME = ("compute_gae_advantage_return", "compute_grpo_outcome_advantage")
_MEANS = ("compute_data_metrics", "compute_variance_proxy_metrics")


def trained_rows(data: DataProto) -> torch.Tensor:
    """bool [B]: rows of ``data`` with a token in the loss."""
    return data.batch["response_mask"].bool().any(dim=-1)


def _with_baseline(rows: torch.Tensor, index: Any) -> torch.Tensor:
    """bool [B]: ``rows`` without a row that is the only one left of a larger group; ``index`` [B] names the groups."""
    _, group, sizes = np.unique(np.asarray(index).astype(str), return_inverse=True, return_counts=True)
    left = np.bincount(group, weights=rows.numpy(), minlength=len(sizes))
    return rows & torch.from_numpy((left > 1) | (left == sizes))[group]


def _of_rows(value: Any, rows: torch.Tensor) -> Any:
    """Return an estimator's argument ``value`` for ``rows`` only; unchanged if it has not one entry for each row."""
    if isinstance(value, dict):
        return {key: _of_rows(each, rows) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return value[rows.numpy()] if value.shape[:1] == rows.shape else value
    return value[rows] if getattr(value, "shape", ())[:1] == rows.shape else value


def _spread(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[B, ...]: ``values`` at ``rows``, 0 at the others."""
    whole = values.new_zeros((len(rows), *values.shape[1:]))
    whole[rows] = values
    return whole


def _estimate(verls: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call verl's estimator ``verls`` on the rows that train.

    One with an argument ``index`` compares the samples of a group.
    """
    names = list(inspect.signature(verls).parameters)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    rows = arguments["response_mask"].bool().any(dim=-1)
    if "index" in names:
        rows = _with_baseline(rows, arguments["index"])
    if rows.all():
        return verls(**arguments)
    if arguments["response_mask"][rows].sum() < 2:
        # A lone token has no variance, and verl refuses to whiten it.
        nothing = torch.zeros(arguments["response_mask"].shape)
        return nothing, nothing.clone()
    found = verls(**{key: _of_rows(value, rows) for key, value in arguments.items()})
    return _spread(found[0], rows), _spread(found[1], rows)


def patch_estimators(module: Any) -> None:
    """Give verl's estimators of the advantage only the rows that train, whoever calls them."""

    @around(module, "get_adv_estimator_fn")
    def get_adv_estimator_fn(verls: Any, name_or_enum: Any) -> Any:
        found = verls(name_or_enum)
        return functools.update_wrapper(functools.partial(_estimate, found), found)

    for name in _CALLED_BY_NAME:
        around(module, name)(_estimate)


def patch_trainer(module: Any) -> None:
    """Give the KL penalty and the logged metrics of verl's trainer only the rows that train.

    Metrics of speculative decoding leave out rows that have no counts of draft tokens.
    """

    @around(module, "apply_kl_penalty")
    def apply_kl_penalty(verls: Any, data: DataProto, *args: Any, **kwargs: Any) -> tuple[DataProto, dict[str, Any]]:
        rows = trained_rows(data)
        if rows.all() or not rows.any():
            return verls(data, *args, **kwargs)
        of_rows, metrics = verls(data.select_idxs(rows), *args, **kwargs)
        data.batch["token_level_rewards"] = data.batch["token_level_scores"].clone()
        data.batch["token_level_rewards"][rows] = of_rows.batch["token_level_rewards"]
        return data, metrics

    @around(module, "compute_spec_decode_metrics")
    def compute_spec_decode_metrics(
        verls: Any, spec_drafts: Any, spec_accepts: Any, spec_verifies: Any, non_padding_mask: Any = None
    ) -> dict[str, Any]:
        if spec_drafts is not None:
            # A sample without an engine call in this process has no counts: it failed, or its tokens are a checkpoint's.
            drafted = np.array([each is not None for each in spec_drafts])
            non_padding_mask = drafted if non_padding_mask is None else drafted & non_padding_mask
        return verls(spec_drafts, spec_accepts, spec_verifies, non_padding_mask)

    patch_means(module)


def patch_means(module: Any) -> None:
    """Give the means that ``module``'s trainer logs only the rows that train.

    For v1's module this is all, because v1 takes the other functions from the module of ``RayPPOTrainer``.
    """

    def of_trained(verls: Any, batch: DataProto, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rows = trained_rows(batch)
        # A copy of the batch where it is not needed: 0.12 s each of 256 samples of up to 8,192 tokens.
        return verls(batch if rows.all() or not rows.any() else batch.select_idxs(rows), *args, **kwargs)

    for name in _MEANS:
        around(module, name)(of_trained)
