"""Scores of a batch and the extra information of its rewards, whose keys and types may differ between samples.

verl takes the keys of the first sample, and averages a column only if all its values are numbers. So each sample
carries its own dictionary (``reward_extra_info``) from worker to trainer. Columns are made once all samples of a batch,
or of a whole validation, are known.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto

from recipe.partial_rollout.manager.policies import SAMPLE_ERROR, is_number, plain
from recipe.partial_rollout.waits import in_thread, wait
from recipe.partial_rollout.worker.loop_rows import LOOP_FIELDS
from recipe.partial_rollout.worker.rewards import REWARD_INFO, checked, gdpo_keys, renamed

_VALIDATED = [REWARD_INFO, SAMPLE_ERROR]
"""columns that verl's validation collects"""


def objects(values: Sequence[Any]) -> np.ndarray:
    """Return a 1-D array of objects, [len(values)], even if all ``values`` are sequences of the same length."""
    array = np.empty(len(values), dtype=object)
    array[:] = list(values)
    return array


def on_generated_tokens(scores: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Move each score to the last generated token at or before it.

    A trajectory may end in a tool's text. verl puts its score on the last token, and estimators that walk back over the
    tokens (``gae``, ``reinforce_plus_plus``) skip the masked ones, so the score would reach no token that trains.

    Args:
        scores: [B, R]. response_mask: [B, R], above 0 where the model generated the token.

    >>> on_generated_tokens(torch.tensor([[0.0, 0, 0, 1]]), torch.tensor([[1, 1, 0, 0]])).tolist()
    [[0.0, 1.0, 0.0, 0.0]]
    """
    positions = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    last_generated = positions.masked_fill(response_mask <= 0, 0).cummax(dim=1).values
    return torch.zeros_like(scores).scatter_add(1, last_generated, scores)


def info_columns(infos: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Make a column of each key that any of ``infos`` has, with a row for each of them.

    A column holds numbers, as verl's does, if every row has one; else objects, None where a sample lacks the key.

    >>> columns = info_columns([{"acc": 1.0, "pred": 12}, {"acc": 0.5, "pred": None}, {"acc": 0, "limit": "cpu"}])
    >>> {key: column.tolist() for key, column in columns.items()}
    {'acc': [1.0, 0.5, 0.0], 'pred': [12, None, None], 'limit': [None, None, 'cpu']}
    """
    # In the order of their first appearance: a set would have another one in each process.
    rows = {
        key: [plain(info.get(key)) for info in infos] for key in dict.fromkeys(key for info in infos for key in info)
    }
    columns = {key: np.array(row) if all(map(is_number, row)) else objects(row) for key, row in rows.items()}
    return renamed(columns, "reward")


def spread_infos(batch: DataProto, *, validate: bool) -> None:
    """Add columns to a batch that verl's manager made: the loops' fields, and the keys of the rewards' dictionaries.

    In training verl reads the columns, and each score moves to a token that trains. In validation verl reads the
    dictionaries: their final columns need all batches of the validation (``per_sample``).
    """
    fields = batch.non_tensor_batch.pop(LOOP_FIELDS)
    names = dict.fromkeys(name for each in fields for name in each)
    if validate:
        # verl collects it from every batch, whether or not a sample of it failed.
        names[SAMPLE_ERROR] = None
    columns = info_columns(list(batch.non_tensor_batch[REWARD_INFO]))
    batch.non_tensor_batch |= {name: objects([each.get(name) for each in fields]) for name in names} | columns
    if "rm_scores" in batch.batch.keys():  # noqa: SIM118
        batch.meta_info["reward_extra_keys"] = _VALIDATED if validate else list(columns)
        if not validate:
            batch.batch["rm_scores"] = on_generated_tokens(batch.batch["rm_scores"], batch.batch["response_mask"])


def colocated_scores(manager: Any, batch: DataProto, reward_s: float) -> DataProto:
    """Return the scores of ``batch`` by a reward model on the devices of the engines, which sleep.

    Args:
        manager: verl's ``RewardLoopManager``.
        reward_s: ``partial_rollout.deadlines.reward_s``; each of verl's reward workers may take it for each of its samples.

    Raises:
        RewardError: a score is no finite number, or lacks one that the training needs.
        TimeoutError: the scores are late.
    """
    deadline_s = reward_s * math.ceil(len(batch) / len(manager.reward_loop_workers))
    # verl blocks its thread until the last score is there, so a deadline needs another one.
    scoring = in_thread(partial(manager.compute_rm_score, batch))
    scored = asyncio.run(wait(scoring, deadline_s, "the scores of the colocated reward model", "reward_s"))
    scores, infos = scored.batch["rm_scores"], scored.non_tensor_batch[REWARD_INFO]
    validate, columns = batch.meta_info.get("validate"), batch.non_tensor_batch
    parts, trained = gdpo_keys(manager.config.algorithm), batch.batch["response_mask"].any(dim=1)
    for i, (score, info) in enumerate(zip(scores.sum(dim=1).tolist(), infos, strict=True)):
        checked(score, columns["uid"][i], info, parts if trained[i] and not validate else ())
    if not validate:
        found = info_columns(infos)
        scored.batch["rm_scores"] = on_generated_tokens(scores, batch.batch["response_mask"])
        return DataProto(scored.batch, found, {"reward_extra_keys": list(found)})
    columns[REWARD_INFO] = objects([{**own, **info} for own, info in zip(columns[REWARD_INFO], infos, strict=True)])
    # No mean counts a sample that failed in its rollout.
    scores[torch.tensor([error is not None for error in columns[SAMPLE_ERROR]])] = math.nan
    return DataProto(scored.batch, {}, {"reward_extra_keys": _VALIDATED})


def per_sample(infos: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Split the list of reward dictionaries in verl's validation ``infos`` into a list for each key.

    Other lists stay, but for that of the failed samples' errors if none failed.
    """
    rest = {key: values for key, values in infos.items() if key != REWARD_INFO and (key != SAMPLE_ERROR or any(values))}
    return {**{key: column.tolist() for key, column in info_columns(infos.get(REWARD_INFO, [])).items()}, **rest}


def writable(value: Any) -> Any:
    """Return ``value``, or its ``ascii`` where verl cannot write it: a lone surrogate has no UTF-8, a tuple is no key.

    >>> writable({"a": [1]}), writable({(1, 2): 3})
    ({'a': [1]}, '{(1, 2): 3}')
    """
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except (TypeError, ValueError, RecursionError):
        return ascii(value)
    return value


def averaged(infos: dict[str, list[Any]], data_sources: Sequence[Any]) -> dict[str, list[Any]]:
    """Return ``infos`` as verl's validation can average them.

    verl skips text and None. If one value of a key is not a number, all values of that key in the same data source become
    text. A NaN reward, of a sample without a score, becomes None.

    >>> averaged({"reward": [1.0, math.nan], "pred": [7, "none"]}, ["gsm8k", "gsm8k"])
    {'reward': [1.0, None], 'pred': ['7', 'none']}
    """
    rewards = [None if isinstance(score, float) and math.isnan(score) else score for score in infos["reward"]]
    found = {**infos, "reward": rewards}
    worded = {
        (key, source)
        for key, values in found.items()
        for value, source in zip(values, data_sources, strict=True)
        if not (value is None or is_number(value))
    }
    return {
        key: [
            str(value) if value is not None and (key, source) in worded else value
            for value, source in zip(values, data_sources, strict=True)
        ]
        for key, values in found.items()
    }
