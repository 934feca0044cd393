"""What the data files hold, before a dataset is made of them: rows, and the columns that loops and rewards read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf
from verl.utils.reward_score import default_compute_score

from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.preflight.user_code import agent_loops
from recipe.partial_rollout.waits import one_line

_KINDS = (".parquet", ".json", ".jsonl")
"""that verl's dataset reads"""
_LOOP = "agent_name"
"""column that names a row's agent loop"""


def check_files(config: DictConfig) -> None:
    """Raise ``ConfigError`` for a data file that verl's dataset cannot read, or that lacks rows or columns.

    A dataset class of the user's own reads what it likes.
    """
    if OmegaConf.select(config, "data.custom_cls.path"):
        return
    for key, name in _files(config):
        if not name.endswith(_KINDS):
            raise fail(key, name, "a file of " + ", ".join(_KINDS))
        try:
            columns, rows = _read(Path(name).expanduser())
        except (pa.ArrowException, OSError, ValueError) as error:
            raise fail(key, name, f"a file that can be read ({one_line(error)})") from error
        if not rows:
            raise fail(key, name, "a file with rows; it has none")
        _check_columns(config, key, name, columns)


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


def _files(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Key and name of each data file."""
    for split in ("train", "val"):
        files = config.data[f"{split}_files"]
        for name in [files] if isinstance(files, str) else files:
            yield f"data.{split}_files", str(name)


def _read(path: Path) -> tuple[dict[str, pa.DataType | None], int]:
    """Columns of a file, with their types if it says them, and how many rows it has; of a JSON file, whether it has any."""
    if path.suffix == ".parquet":
        file = pq.ParquetFile(path)
        return {field.name: field.type for field in file.schema_arrow}, file.metadata.num_rows
    with path.open() as lines:
        first = next((line for line in lines if line.strip()), "")
    try:
        row = json.loads(first or "{}")
    except json.JSONDecodeError:
        # One value over many lines.
        row = json.loads(path.read_text())
    row = row[0] if isinstance(row, list) and row else row
    return (dict.fromkeys(row), 1) if isinstance(row, dict) and row else ({}, 0)


def _check_columns(config: DictConfig, key: str, name: str, columns: dict[str, pa.DataType | None]) -> None:
    if config.data.prompt_key not in columns:
        raise fail("data.prompt_key", config.data.prompt_key, f"a column of {name}: {', '.join(columns)}")
    if _rewards_by_rows(config):
        manager = config.reward.reward_manager.name
        reads = f"a file with columns data_source and reward_model.ground_truth, which reward manager {manager} reads"
        for column in ("data_source", "reward_model"):
            if column not in columns:
                raise fail(key, name, f"{reads}; it has no {column}")
        kind: Any = columns["reward_model"]
        if kind is not None and not (pa.types.is_struct(kind) and kind.get_field_index("ground_truth") >= 0):
            raise fail(key, name, f"{reads}; its reward_model is {kind}")
        if kind is not None and not config.reward.custom_reward_function.path:
            _check_sources(name)
    if _LOOP in columns and columns[_LOOP] is not None:
        known = agent_loops(config)
        for loop in pq.read_table(Path(name).expanduser(), columns=[_LOOP])[_LOOP].unique().to_pylist():
            if loop not in known:
                raise fail(key, name, f"a file whose column {_LOOP} has {', '.join(sorted(known))}; it has {loop}")


def _check_sources(name: str) -> None:
    """Raise ``ConfigError`` for a ``data_source`` of the file that verl has no reward function for."""
    for source in pq.read_table(Path(name).expanduser(), columns=["data_source"])["data_source"].unique().to_pylist():
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
