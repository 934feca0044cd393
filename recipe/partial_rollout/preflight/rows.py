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
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.reward_score import default_compute_score

from recipe.partial_rollout.checkpoint.plain_state import UnsaveableError, pack
from recipe.partial_rollout.config.keys import ConfigError, fail, refusing
from recipe.partial_rollout.config.settings import PartialRolloutConfig, SchedulingPolicy
from recipe.partial_rollout.manager.scheduling import POLICY, ClaimQueue, order_of
from recipe.partial_rollout.manager.types import Prompt, PromptGroup, Sample
from recipe.partial_rollout.preflight.facts import at
from recipe.partial_rollout.preflight.inputs import data_files
from recipe.partial_rollout.preflight.user_code import agent_loops, is_verls_loop
from recipe.partial_rollout.rollout.prompt_source import rows_of

_LOOP = "agent_name"
"""column that names a row's agent loop"""
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


def check_patterns(config: DictConfig) -> None:
    """Refuse a data file whose path is a pattern: of data/a[1]/x.parquet verl would read data/a1/x.parquet."""
    for key, name in data_files(config):
        if pattern := sorted({*"*?[]"} & {*name}):
            words = f"a path without {' '.join(pattern)}, which the reader of data files takes for a pattern"
            raise fail(key, name, words)


def check_columns(config: DictConfig, dataset: Any, key: str) -> None:
    """Refuse rows that name an unknown agent loop, or lack what verl's reward managers read.

    verl would find neither before a sample is made. A dataset class of the user's own may keep no table.
    """
    table, value = getattr(dataset, "dataframe", None), at(config, key)
    if table is None:
        return
    columns, loops = table.column_names, [config.actor_rollout_ref.rollout.agent.default_agent_loop]
    if config.data.prompt_key not in columns:
        raise fail("data.prompt_key", config.data.prompt_key, f"a column of {value}: {', '.join(columns)}")
    if _LOOP in columns:
        loops, known = table.unique(_LOOP), agent_loops(config)
        if unknown := {*loops} - known:
            words = f"rows whose column {_LOOP} has {', '.join(sorted(known))}; it has {', '.join(map(str, unknown))}"
            raise fail(key, value, words)
    # A loop of the user's own may score its samples itself.
    if not (_rewards_by_rows(config) and all(is_verls_loop(config, loop) for loop in loops)):
        return
    for column in ("data_source", "reward_model"):
        if column not in columns:
            manager = config.reward.reward_manager.name
            words = f"rows with data_source and reward_model.ground_truth, which reward manager {manager} reads"
            raise fail(key, value, f"{words}; they have no {column}")
    if not config.reward.custom_reward_function.path:
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


def _rewards_by_rows(config: DictConfig) -> bool:
    """Whether one of verl's reward managers scores a sample by its row; a reward model alone does not."""
    reward = config.reward
    alone = reward.reward_model.enable and not reward.custom_reward_function.path
    return reward.reward_manager.source == "register" and not alone


def check_rows(config: DictConfig, settings: PartialRolloutConfig, dataset: Sequence[dict[str, Any]]) -> None:
    """Raise ``ConfigError`` for rows of ``dataset`` that an order of the user's own, or a checkpoint, cannot take."""
    if not settings.enable:
        return
    rows = np.linspace(0, len(dataset) - 1, min(len(dataset), _ROWS)).astype(int).tolist()
    if OmegaConf.select(config, POLICY) not in (None, *SchedulingPolicy):
        _check_order(PartialRolloutConfig.from_config(config), [dataset[i] for i in rows])
    if config.trainer.save_freq <= 0:
        return
    for i in rows:
        try:
            pack({column: value for column, value in dataset[i].items() if not isinstance(value, torch.Tensor)})
        except UnsaveableError as error:
            remedy = "(store it as text, or train without checkpoints: trainer.save_freq=-1)"
            raise fail("data.train_files", config.data.train_files, f"row {i}, column {error} {remedy}") from None


def _check_order(settings: PartialRolloutConfig, rows: list[dict[str, Any]]) -> None:
    """Evaluate the order's key of each of ``rows`` as a new prompt, and as a group of which one sample has finished."""
    queue = ClaimQueue(order_of(settings.scheduling, settings.batch_groups))
    samples = settings.samples_per_group
    for row in rows_of(collate_fn(rows)):
        for birth, finished in ((None, 0), (0, 1)):
            group = PromptGroup(
                Prompt("0/0", row), 0, birth=birth, unfinished=samples - finished, finished_length=finished
            )
            group.samples = [Sample(f"0/0#{i}", group) for i in range(samples)]
            queue.push(group.samples[-1])
        if queue.problem is not None:
            raise ConfigError(f"{POLICY}={settings.scheduling.policy}: {queue.problem}")
