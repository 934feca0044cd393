"""What the data hold: rows, the columns that loops and rewards read, and prompts that fit.

Rows are refused whose prompt is too long (verl's agent loops would cut it on the left, with a warning), or that a
checkpoint cannot hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
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

_TRAIN = "data.train_files"
_KINDS = (".parquet", ".json", ".jsonl")
"""that verl's dataset reads"""
_LOOP = "agent_name"
"""column that names a row's agent loop"""
_TAKEN = {"self", "sampling_params", "trajectory", "trace", "output", "validate"}
"""arguments of verl's agent-loop worker, which gets a row's columns as further ones"""
_BATCH = 512
"""prompts that the tokenizer gets at once; it spreads them over the cores"""
_ROWS = 256
"""rows that are tried, spread over the dataset: its columns have types, but their first rows may be null"""


def check_files(config: DictConfig) -> None:
    """Raise ``ConfigError`` for a data file that verl's dataset cannot read, or whose columns or rows a run would break on.

    A dataset class of the user's own reads what it likes.
    """
    if OmegaConf.select(config, "data.custom_cls.path"):
        return
    for key, name in data_files(config):
        if not name.endswith(_KINDS):
            raise fail(key, name, "a file of " + ", ".join(_KINDS))
        if pattern := sorted({*"*?[]"} & {*name}):
            # Of data/a[1]/x.parquet it would read data/a1/x.parquet, if that is there.
            raise fail(
                key, name, f"a path without {' '.join(pattern)}, which the reader of data files takes for a pattern"
            )
        reader = "parquet" if name.endswith(".parquet") else "json"
        with refusing(key, name, "a file with rows that can be read"):
            # As verl reads it, which finds it in the cache then.
            table: Any = load_dataset(reader, data_files=name, split="train")
        _check_columns(config, key, name, table)


def _check_columns(config: DictConfig, key: str, name: str, table: Any) -> None:
    columns = table.column_names
    if config.data.prompt_key not in columns:
        raise fail("data.prompt_key", config.data.prompt_key, f"a column of {name}: {', '.join(columns)}")
    if taken := sorted(_TAKEN & {*columns}):
        raise fail(key, name, f"a file without a column {taken[0]}: verl's agent loops have an argument of that name")
    loops = [config.actor_rollout_ref.rollout.agent.default_agent_loop]
    if _LOOP in columns:
        loops, known = table.unique(_LOOP), agent_loops(config)
        for loop in loops:
            if loop not in known:
                raise fail(key, name, f"a file whose column {_LOOP} has {', '.join(sorted(known))}; it has {loop}")
    # A loop of the user's own may score its samples itself.
    scored = _rewards_by_rows(config) and all(is_verls_loop(config, loop) for loop in loops)
    if scored:
        manager = config.reward.reward_manager.name
        reads = f"a file with columns data_source and reward_model.ground_truth, which reward manager {manager} reads"
        for column in ("data_source", "reward_model"):
            if column not in columns:
                raise fail(key, name, f"{reads}; it has no {column}")
        if not config.reward.custom_reward_function.path:
            _check_sources(name, table)
    # A validation looks into it whoever scores.
    if "reward_model" in columns and (scored or key != _TRAIN):
        for row, truth in enumerate(table["reward_model"]):
            if not isinstance(truth, Mapping) or (scored and "ground_truth" not in truth):
                words = f"rows with reward_model.ground_truth; row {row} has reward_model={truth!r:.60}"
                raise fail(key, name, words)


def _check_sources(name: str, table: Any) -> None:
    """Raise ``ConfigError`` for a ``data_source`` of the file that verl has no reward function for."""
    for source in table.unique("data_source"):
        try:
            # What verl has fails otherwise, for there is nothing to score; one of them prints.
            with redirect_stdout(StringIO()):
                default_compute_score(source, None, None)
        except NotImplementedError as error:
            words = f"a file with your reward function; verl has none for data_source={source} of {name}"
            raise fail("reward.custom_reward_function.path", None, words) from error
        except Exception:
            continue


def _rewards_by_rows(config: DictConfig) -> bool:
    """Whether one of verl's reward managers scores a sample by its row; a reward model alone does not."""
    reward = config.reward
    alone = reward.reward_model.enable and not reward.custom_reward_function.path
    return reward.reward_manager.source == "register" and not alone


# -- the dataset that verl makes of them -------------------------------------------------------------------------------


def check_steps(config: DictConfig, prompts: int, held_out: int | None = None) -> None:
    """Raise ``ConfigError`` where ``prompts`` make no batch, or ``held_out`` prompts are none."""
    batch = config.data.train_batch_size
    if prompts < batch:
        fitting = f"the prompts of at most data.max_prompt_length={config.data.max_prompt_length} tokens"
        if config.data.filter_overlong_prompts:
            # verl's filter takes a prompt that the template refuses for too long.
            fitting += ", which the chat template takes,"
        raise fail("data.train_batch_size", batch, f"at most {prompts}, {fitting} that data.train_files gives")
    if held_out == 0:
        words = f"a file with prompts of at most data.max_prompt_length={config.data.max_prompt_length} tokens"
        raise fail("data.val_files", config.data.val_files, words)


def dataset_of(config: DictConfig, split: str, tokenizer: Any, processor: Any = None, **changes: Any) -> Any:
    """verl's dataset of ``split``, with ``changes`` of the keys of ``data``.

    Raises:
        ConfigError: the files do not make one, or a class of the user's own has rows that verl's agent loops cannot take.
    """
    key, data = f"data.{split}_files", OmegaConf.merge(config.data, changes)
    assert isinstance(data, DictConfig)
    most = data.get(f"{split}_max_samples", -1)
    with refusing(key, at(config, key), "files whose rows make one table", (DatasetsError, ValueError)):
        dataset: Any = create_rl_dataset(
            config.data[f"{split}_files"], data, tokenizer, processor, is_train=split == "train", max_samples=most
        )
    if at(config, "data.custom_cls.path") and len(dataset):
        _check_own(config, dataset)
    return dataset


def _check_own(config: DictConfig, dataset: Sequence[Any]) -> None:
    own, rows = config.data.custom_cls.path, "a dataset class whose rows"
    with refusing("data.custom_cls.path", own, f"{rows} can be read"):
        columns = dict(dataset[0]).keys()
    if "raw_prompt" not in columns:
        has = ", ".join(map(str, columns))
        raise fail("data.custom_cls.path", own, f"{rows} have raw_prompt, the messages of a prompt; they have {has}")
    if taken := sorted(_TAKEN & columns):
        allowed = f"{rows} have no {taken[0]}: verl's agent loops have an argument of that name"
        raise fail("data.custom_cls.path", own, allowed)


def check_prompts(config: DictConfig, tokenizer: Any, dataset: Sequence[Any], key: str = _TRAIN) -> None:
    """Raise ``ConfigError`` if a prompt is longer than ``data.max_prompt_length`` tokens, unless verl leaves such out."""
    if not config.data.filter_overlong_prompts:
        check_lengths(config, prompt_lengths(config, tokenizer, dataset, key), key)


def check_lengths(config: DictConfig, lengths: np.ndarray, key: str = _TRAIN) -> None:
    """``check_prompts``, of prompts of these ``lengths``."""
    limit = config.data.max_prompt_length
    over = int((lengths > limit).sum())
    if not over:
        return
    longest = int(lengths.argmax())
    raise fail(
        "data.max_prompt_length",
        limit,
        f"at least {lengths[longest]}, the tokens of row {longest} of {key}; {over:,} of {len(lengths):,} "
        f"prompts are longer than {limit} (data.filter_overlong_prompts=True leaves them out)",
    )


def prompt_lengths(config: DictConfig, tokenizer: Any, dataset: Sequence[Any], key: str = _TRAIN) -> np.ndarray:
    """int32 [rows of ``dataset``]: tokens of each prompt with the chat template and the dataset's tools."""
    options = config.data.get("apply_chat_template_kwargs") or {}
    tools = getattr(dataset, "tool_schemas", None)
    lengths = np.zeros(len(dataset), np.int32)
    with tqdm(total=len(dataset), desc="prompt lengths", unit=" prompts", leave=False) as bar:
        for start in range(0, len(dataset), _BATCH):
            rows = range(start, min(start + _BATCH, len(dataset)))
            words = (
                f"prompts that the model's chat template takes; of rows {rows.start} to {rows.stop - 1} it refuses one"
            )
            with refusing(key, at(config, key), words, (TemplateError, TypeError, ValueError)):
                chats = [list(dataset[i]["raw_prompt"]) for i in rows]
                encoded = tokenizer.apply_chat_template(
                    chats, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True, **options
                )
            lengths[rows.start : rows.stop] = [len(ids) for ids in encoded["input_ids"]]
            bar.update(len(rows))
    return lengths


def check_rows(config: DictConfig, dataset: Sequence[dict[str, Any]]) -> None:
    """Raise ``ConfigError`` for rows of ``dataset`` that an order of the user's own, or a checkpoint, cannot take."""
    if not config.partial_rollout.enable:
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
