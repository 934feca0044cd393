"""Checks of the rows of the data set: prompts that are too long, and columns that a checkpoint cannot hold.

Lengths are measured once per data file and tokenizer.
verl's agent loops would cut an over-long prompt on the left, with a warning.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from recipe.partial_rollout.checkpoint.plain_codec import UnsaveableError, pack
from recipe.partial_rollout.config.keys import fail

_BATCH = 512
"""prompts that the tokenizer gets at once; it spreads them over the cores"""
_READ_BYTES = 1 << 20
_ROWS = 256
"""rows that are tried, spread over the dataset: its columns have types, but their first rows may be null"""


def check_prompts(config: DictConfig, tokenizer: Any, dataset: Sequence[Any]) -> None:
    """Raise ``ConfigError`` if a prompt is longer than ``data.max_prompt_length`` tokens.

    ``data.filter_overlong_prompts=True`` leaves such prompts out, so nothing is checked.
    """
    if config.data.filter_overlong_prompts:
        return
    limit = config.data.max_prompt_length
    lengths = prompt_lengths(config, tokenizer, dataset)
    if (over := int((lengths > limit).sum())) == 0:
        return
    longest = int(lengths.argmax())
    raise fail(
        "data.max_prompt_length",
        limit,
        f"at least {lengths[longest]}, the tokens of row {longest} of data.train_files; {over:,} of {len(lengths):,} "
        f"prompts are longer than {limit} (data.filter_overlong_prompts=True leaves them out)",
    )


def prompt_lengths(config: DictConfig, tokenizer: Any, dataset: Sequence[Any]) -> np.ndarray:
    """int32 [rows of ``dataset``]: tokens of each prompt with the chat template; cached by a hash of its inputs."""
    key = _fingerprint(config, tokenizer)
    if key is None:
        return _measure(config, tokenizer, dataset)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = root / "verl_partial_rollout" / f"prompt_lengths_{key}.npy"
    if path.is_file():
        return np.load(path)
    lengths = _measure(config, tokenizer, dataset)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{path.stem}.{os.getpid()}.npy")
    np.save(staged, lengths)
    staged.replace(path)
    return lengths


def _measure(config: DictConfig, tokenizer: Any, dataset: Sequence[Any]) -> np.ndarray:
    options = config.data.get("apply_chat_template_kwargs") or {}
    lengths = np.zeros(len(dataset), np.int32)
    with tqdm(total=len(dataset), desc="prompt lengths", unit=" prompts", leave=False) as bar:
        for start in range(0, len(dataset), _BATCH):
            rows = range(start, min(start + _BATCH, len(dataset)))
            chats = [list(dataset[i]["raw_prompt"]) for i in rows]
            encoded = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, tokenize=True, return_dict=True, **options
            )
            lengths[rows.start : rows.stop] = [len(ids) for ids in encoded["input_ids"]]
            bar.update(len(rows))
    return lengths


def _fingerprint(config: DictConfig, tokenizer: Any) -> str | None:
    """What the lengths depend on; None if that cannot be told (a dataset class or a tokenizer of one's own)."""
    data, backend = config.data, getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or OmegaConf.select(data, "custom_cls.path"):
        return None
    digest = hashlib.sha256(backend.to_str().encode())
    files = data.train_files
    keys = (
        "prompt_key",
        "train_max_samples",
        "shuffle",
        "seed",
        "filter_overlong_prompts",
        "apply_chat_template_kwargs",
    )
    chosen = {key: OmegaConf.select(data, key) for key in keys}
    digest.update(json.dumps([str(tokenizer.chat_template), str(chosen)]).encode())
    for name in [files] if isinstance(files, str) else files:
        with Path(str(name)).expanduser().open("rb") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
    return digest.hexdigest()[:32]


def check_rows(config: DictConfig, dataset: Sequence[dict[str, Any]]) -> None:
    """Raise ``ConfigError`` for a column of ``dataset`` that a checkpoint cannot hold."""
    if not config.partial_rollout.enable or config.trainer.save_freq <= 0:
        return
    for i in np.linspace(0, len(dataset) - 1, min(len(dataset), _ROWS)).astype(int).tolist():
        try:
            pack({column: value for column, value in dataset[i].items() if not isinstance(value, torch.Tensor)})
        except UnsaveableError as error:
            remedy = "(store it as text, or train without checkpoints: trainer.save_freq=-1)"
            raise fail("data.train_files", config.data.train_files, f"row {i}, column {error} {remedy}") from None
