"""Check the rows of the data: the columns that loops and rewards read, and what a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.reward_score import default_compute_score

from recipe.partial_rollout.checkpoint.plain_state import UnsaveableError, pack
from recipe.partial_rollout.config.keys import fail, refusing
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.preflight.rule import at
from recipe.partial_rollout.preflight.user_code import agent_loops

_LOOP = "agent_name"
"""column that names a row's agent loop"""
_VERLS_LOOPS = {"single_turn_agent", "tool_agent"}
_ROWS = 256
"""rows that are tried, spread over the dataset: its columns have types, but their first rows may be null"""


def dataset_of(config: DictConfig, split: str, tokenizer: Any, processor: Any = None, **changes: Any) -> Any:
    """Make verl's dataset of ``split``, with ``changes`` of the keys of ``data``.

    Raises:
        ConfigError: the files or the class of ``data.custom_cls`` make none.
    """
    data: Any = OmegaConf.merge(config.data, changes)
    key = "data.custom_cls.path" if data.custom_cls.path else f"data.{split}_files"
    files, most = data[f"{split}_files"], data.get(f"{split}_max_samples", -1)
    with refusing(key, at(config, key), "files, or a class of data.custom_cls, that verl can make a dataset of"):
        return create_rl_dataset(files, data, tokenizer, processor, is_train=split == "train", max_samples=most)


def check_columns(config: DictConfig, dataset: Any, key: str) -> None:
    """Refuse rows that name an unknown agent loop, or lack what verl's reward managers read.

    verl would find neither before a sample is made. A dataset class of the user's own may keep no table.
    """
    table, value = getattr(dataset, "dataframe", None), at(config, key)
    if table is None:
        return
    columns, loops = table.column_names, [config.actor_rollout_ref.rollout.agent.default_agent_loop]
    if _LOOP in columns:
        loops, known = table.unique(_LOOP), agent_loops(config)
        if unknown := {*loops} - known:
            words = f"rows whose column {_LOOP} has {', '.join(sorted(known))}; it has {', '.join(map(str, unknown))}"
            raise fail(key, value, words)
    # A loop of the user's own may score its samples itself.
    own_loops = config.actor_rollout_ref.rollout.agent.agent_loop_config_path or {*loops} - _VERLS_LOOPS
    reward = config.reward
    # A reward model alone reads no row.
    by_model = reward.reward_model.enable and not reward.custom_reward_function.path
    if own_loops or by_model or reward.reward_manager.source != "register":
        return
    for column in ("data_source", "reward_model"):
        if column not in columns:
            words = "rows with data_source and reward_model.ground_truth, which reward manager"
            raise fail(key, value, f"{words} {reward.reward_manager.name} reads; they have no {column}")
    if not reward.custom_reward_function.path:
        _check_sources(key, table)


def _check_sources(key: str, table: Any) -> None:
    """Raise ``ConfigError`` for a ``data_source`` that verl has no reward function for."""
    for source in table.unique("data_source"):
        try:
            # What verl has fails otherwise, for there is nothing to score; one of them prints.
            with redirect_stdout(StringIO()):
                default_compute_score(source, None, None)
        except NotImplementedError as error:
            words = f"a file with your reward function; verl has none for data_source={source} of {key}"
            raise fail("reward.custom_reward_function.path", None, words) from error
        except Exception:
            continue


def check_rows(config: DictConfig, settings: PartialRolloutConfig, dataset: Sequence[dict[str, Any]]) -> None:
    """Raise ``ConfigError`` for rows of ``dataset`` that a checkpoint cannot hold."""
    if not settings.enable or config.trainer.save_freq <= 0:
        return
    for i in np.linspace(0, len(dataset) - 1, min(len(dataset), _ROWS)).astype(int).tolist():
        try:
            pack({column: value for column, value in dataset[i].items() if not isinstance(value, torch.Tensor)})
        except UnsaveableError as error:
            remedy = "(store it as text, or train without checkpoints: trainer.save_freq=-1)"
            raise fail("data.train_files", config.data.train_files, f"row {i}, column {error} {remedy}") from None
