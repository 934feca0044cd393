"""Check the rows of the data before Ray starts.

Their prompts must reach the model whole, their images must fit into memory, and a checkpoint must be able to hold them.
``columns`` checks which columns they have.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow.parquet
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer.chat_template import apply_chat_template
from verl.utils.tokenizer.tokenizer import build_multimodal_processor_inputs

from recipe.partial_rollout.checkpoint.plain_state import UnsaveableError, pack
from recipe.partial_rollout.checkpoint.row_images import MESSAGES, closed_row, kinds_of
from recipe.partial_rollout.config.keys import fail, refusing
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.preflight.columns import LOOP, UNSAVED_REMEDY, VERLS_LOOPS, check_types
from recipe.partial_rollout.preflight.inputs import INSTALL_IMAGES, is_installed
from recipe.partial_rollout.preflight.rule import at
from recipe.partial_rollout.worker.pictures import SEES, Pictures

MOST_TRIED = 256
"""most rows that are tried, at even distances over the dataset, because its first rows may hold null"""
_SEEN = 16
"""most of the ``MOST_TRIED`` rows whose images are processed; this takes up to 0.1 s a megapixel"""
_PIXEL_COPIES = 12
"""copies of a batch's pixels in the memory of the driver's node: 3 in the driver, up to 6 in Ray's store, others in
trainers"""
_GIB = 2**30


def dataset_of(config: DictConfig, split: str, tokenizer: Any, processor: Any = None, **changes: Any) -> Any:
    """Make verl's dataset of ``split``, with ``changes`` of the keys of ``data``.

    Raises:
        ConfigError: verl can make no dataset of the files, or of the class in ``data.custom_cls``; or the model takes
            images, the files have some, and qwen_vl_utils is not installed.
    """
    data: Any = OmegaConf.merge(config.data, changes)
    key = "data.custom_cls.path" if data.custom_cls.path else f"data.{split}_files"
    files, most = data[f"{split}_files"], data.get(f"{split}_max_samples", -1)
    if processor is not None and not is_installed("qwen_vl_utils") and _has_column(files, data.image_key):
        # verl would leave every such row out.
        words = (
            f"the rows have images, which need the package qwen_vl_utils; it is not installed: run `{INSTALL_IMAGES}`, "
            f"or give files without the column {data.image_key}"
        )
        raise fail(f"data.{split}_files", files, words)
    with refusing(key, at(config, key), "files, or a class of data.custom_cls, that verl can make a dataset of"):
        return create_rl_dataset(files, data, tokenizer, processor, is_train=split == "train", max_samples=most)


def _has_column(files: Any, column: str) -> bool:
    """Whether one of the parquet files among ``files`` has ``column``."""
    names = [files] if isinstance(files, str) else files
    found = (name for name in names if str(name).endswith(".parquet") and Path(name).is_file())
    return any(column in pyarrow.parquet.read_schema(name).names for name in found)


def check_rows(
    config: DictConfig, settings: PartialRolloutConfig, dataset: Sequence[dict[str, Any]], key: str, renderer: Any
) -> None:
    """Refuse rows that verl cannot read, whose prompt does not reach the model whole, or that no checkpoint can hold.

    Under partial rollout refuse media other than images, and images whose batch does not fit into this machine's
    memory. At most ``MOST_TRIED`` rows are tried.

    Args:
        dataset: made from the files that ``key`` names.
        renderer: the processor or tokenizer that has the chat template.

    Raises:
        ConfigError: for the first such row; it gives the row's number in the files.
    """
    value, numbers = at(config, key), file_rows(dataset)
    saved = settings.enable and config.trainer.save_freq > 0 and key == "data.train_files"
    model = config.reward.reward_model
    by_workers = not model.enable or model.enable_resource_pool
    pixels: list[int] = []
    first: Iterable[str] | None = None
    for i in _tried(range(len(dataset))):
        with refusing(key, value, f"{_wanted(config)}; row {numbers[i]} is not such a row"):
            row = dataset[i]
            kinds, verls = kinds_of(row.get(MESSAGES)), _is_verls(config, row)
            if _is_rendered(config, row):
                _check_prompt(row["raw_prompt"], rendering_of(config, dataset, row, renderer))
            if verls and "image" in kinds and len(pixels) < _SEEN:
                pixels.append(_checked_pixels(config, dataset, row, renderer))
            if verls:
                int(row.get("priority", 0))
        first = first or row.keys()
        _check_keys(key, value, numbers[i], row.keys(), first)
        if settings.enable:
            _check_media(config, key, numbers[i], kinds, renderer)
        if verls and by_workers:
            _check_arrays(key, value, numbers[i], row)
        if saved:
            _check_saved(key, value, numbers[i], row)
    if saved:
        check_types(config, dataset, key)
    if settings.enable and pixels:
        _check_memory(key, value, config.data.train_batch_size * float(np.mean(pixels)))


def _check_keys(key: str, value: Any, number: int, keys: Iterable[str], first: Iterable[str]) -> None:
    """Raise ``ConfigError`` if row ``number`` has other keys than the first row: a batch has one column for each key."""
    lacks, has = sorted({*first} - {*keys}), sorted({*keys} - {*first})
    if lacks or has:
        parts = [f"{verb} {', '.join(names)}" for verb, names in (("lacks", lacks), ("has", has)) if names]
        raise fail(
            key, value, f"rows that all have the same keys; row {number} {', '.join(parts)}, unlike the first row"
        )


def _check_arrays(key: str, value: Any, number: int, row: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a column of row ``number`` of which verl's call of a reward worker can make no array."""
    for column, each in row.items():
        words = (
            f"row {number}, column {column}: verl's reward call makes an array of it, which needs lists of one length"
        )
        with refusing(key, value, words, ValueError):
            if not isinstance(each, torch.Tensor):
                np.array([each])


def _check_saved(key: str, value: Any, number: int, row: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for a column of row ``number`` that no checkpoint can hold."""
    with refusing(key, value, f"rows whose images can be saved as PNG files; row {number} has an image that cannot"):
        closed = closed_row(row)
    try:
        pack({column: each for column, each in closed.items() if not isinstance(each, torch.Tensor)})
    except UnsaveableError as error:
        raise fail(key, value, f"row {number}, column {error} {UNSAVED_REMEDY}") from None


def check_left_out(config: DictConfig, dataset: Any, split: str, tokenizer: Any, processor: Any) -> None:
    """Refuse rows that verl's filter has left out of the ``dataset`` of ``split`` because it could not render them.

    verl counts such a row as too long. Rows that are only too long pass. At most ``MOST_TRIED`` are tried. Only a
    dataset from which rows are left out is loaded again, without the filter.

    Raises:
        ConfigError: for the first such row; it gives the row's number in the files. Or because the filter itself fails
            (``_check_filter``).
    """
    table, key = getattr(dataset, "dataframe", None), f"data.{split}_files"
    if not isinstance(table, datasets.Dataset) or len(table) == table.data.num_rows:
        return
    whole = dataset_of(config, split, tokenizer, processor, filter_overlong_prompts=False)
    numbers, kept, renderer, seen = file_rows(whole), {*file_rows(dataset)}, processor or tokenizer, 0
    left = [i for i, number in enumerate(numbers) if number not in kept]
    for i in _tried(left):
        words = f"{_wanted(config)}; row {numbers[i]} is not such a row, and verl would leave it out without a word"
        with refusing(key, at(config, key), words):
            row = whole[i]
            if "image" in kinds_of(row.get(MESSAGES)) and seen < _SEEN:
                processed(config, whole, row, renderer)
                seen += 1
            elif _is_rendered(config, row):
                rendering_of(config, whole, row, renderer)
    _check_filter(config, whole, left)


def _check_filter(config: DictConfig, dataset: Any, rows: Sequence[int]) -> None:
    """Refuse a class of the user's if verl's filter fails on its rows in processes of its own, but not in this one.

    If the class is in a file of the user's, such a process has it without the methods that it inherits from verl's class.
    verl's filter calls some of them for models that take images.

    Args:
        dataset: without the filter.
        rows: those that the filter left out of it.
    """
    if not rows or not config.data.custom_cls.path or not isinstance(dataset, RLHFDataset):
        return
    dataset.filter_overlong_prompts, dataset.num_workers = True, None
    left_out, path = dataset.dataframe.select(_tried(rows, _SEEN)), config.data.custom_cls.path
    with refusing("data.custom_cls.path", path, "a class whose rows verl's filter can measure"):
        fitting = len(dataset.maybe_filter_out_long_prompts(left_out))
    if fitting:
        key = "data.filter_overlong_prompts_workers"
        words = (
            "null with this class of data.custom_cls: in a process of its own verl's filter leaves out rows that fit"
        )
        raise fail(key, at(config, key), words)


def _tried(rows: Sequence[int], most: int = MOST_TRIED) -> list[int]:
    """At most ``most`` of ``rows``, at even distances."""
    chosen = np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(int)
    return [rows[i] for i in chosen]


def _wanted(config: DictConfig) -> str:
    """Describe the rows that verl can read."""
    return (
        f"rows whose {config.data.prompt_key} is a list of messages, each with a role and a content that the chat template "
        "writes (extra_info is a dictionary, priority a number; images need a model that sees)"
    )


def _is_verls(config: DictConfig, row: Mapping[str, Any]) -> bool:
    """Whether one of verl's own agent loops runs ``row``."""
    return row.get(LOOP, config.actor_rollout_ref.rollout.agent.default_agent_loop) in VERLS_LOOPS


def _is_rendered(config: DictConfig, row: Mapping[str, Any]) -> bool:
    """Whether the chat template must be able to write the prompt of ``row``.

    A loop of the user's own may read other columns, or a prompt of another kind.
    """
    return _is_verls(config, row) or _are_messages(row.get(MESSAGES))


def _check_media(config: DictConfig, key: str, number: int, kinds: set[str], renderer: Any) -> None:
    """Raise ``ConfigError`` if row ``number`` has media, of ``kinds``, that partial rollout does not train."""
    if others := kinds & {"video", "audio"}:
        words = f"rows of text and images, with partial_rollout.enable=True; row {number} has {', '.join(others)}"
        raise fail(key, at(config, key), words)
    if "image" in kinds and not hasattr(renderer, "get_rope_index"):
        allowed = (
            f"a {SEES}, the models whose images partial rollout trains; partial_rollout.enable=False trains others"
        )
        raise fail("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path, allowed)


def _checked_pixels(config: DictConfig, dataset: Any, row: Mapping[str, Any], processor: Any) -> int:
    """Return the bytes of the pixels that the model gets of the images of ``row``.

    Raises:
        ValueError: prompt and images together exceed ``rollout.prompt_length``. Errors of verl's processing pass
        through.
    """
    made = processed(config, dataset, row, processor)
    if (tokens := len(made["input_ids"][0])) > (most := config.actor_rollout_ref.rollout.prompt_length):
        raise ValueError(f"its prompt has {tokens:,} tokens with its images, more than rollout.prompt_length={most:,}")
    return made["pixel_values"].nbytes


def processed(config: DictConfig, dataset: Any, row: Mapping[str, Any], processor: Any) -> Any:
    """Process the prompt of ``row``, which shows images; return ``input_ids`` [1, L], ``pixel_values``, ..."""
    images = asyncio.run(Pictures(config, processor.tokenizer, processor, type(dataset)).of_row(dict(row)))
    text = [rendering_of(config, dataset, row, processor)]
    kwargs = config.data.get("mm_processor_kwargs")
    return build_multimodal_processor_inputs(processor, text=text, images=images, mm_processor_kwargs=kwargs)


def _check_memory(key: str, value: Any, batch: float) -> None:
    """Raise ``ConfigError`` where the pixels of a batch, ``batch`` bytes, do not fit into what is free of this machine."""
    needed, free = _PIXEL_COPIES * batch / _GIB, psutil.virtual_memory().available / _GIB
    if needed > free:
        words = (
            f"the images of a batch need {needed:.1f} GiB ({_PIXEL_COPIES} copies of their pixels), and {free:.1f} GiB are "
            f"free on this machine: make the images or data.train_batch_size smaller (docs/own_job.md#memory)"
        )
        raise fail(key, value, words)


def file_rows(dataset: Any) -> Sequence[int]:
    """For each row of ``dataset`` its number in the data files, from 0; verl may have filtered out rows before it."""
    indices = getattr(getattr(dataset, "dataframe", None), "_indices", None)
    return range(len(dataset)) if indices is None else indices.column(0).to_pylist()


def rendering_of(config: DictConfig, dataset: Any, row: Mapping[str, Any], renderer: Any) -> Any:
    """Return the prompt of ``row`` as text, written by the chat template as in verl's agent loops.

    Raises:
        ValueError: the prompt is not a list of messages. The template may raise any other error.
    """
    prompt = row["raw_prompt"]
    if isinstance(prompt, str) or not len(prompt):
        raise ValueError(f"it has no list of messages: {prompt!r:.120}")
    return apply_chat_template(
        renderer,
        [*prompt],
        tokenize=False,
        tools=getattr(dataset, "tool_schemas", None),
        **(config.data.get("apply_chat_template_kwargs") or {}),
    )


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, list | np.ndarray) and all(isinstance(message, Mapping) for message in prompt)


def _check_prompt(prompt: Any, rendering: str) -> None:
    """Raise ``ValueError`` for the first message of ``prompt`` whose text is not in ``rendering`` (``_is_in``)."""
    for message in prompt:
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if "text" in (part.get("type") or "text")]
        # A template for text alone may print a list of parts as Python does.
        printed = parts is content and str(content) in rendering
        if printed or not all(isinstance(text, str) and _is_in(rendering, text) for text in texts):
            raise ValueError(
                f"the chat template leaves out text of {message!r:.120}, or prints its content as a Python list"
            )


def _is_in(rendering: str, text: str) -> bool:
    """Whether ``rendering`` has ``text``: the part after ``</think>``, stripped; or all of it, escaped as in JSON."""
    answer = text.rpartition("</think>")[2].strip()
    return answer in rendering or json.dumps(text, ensure_ascii=False)[1:-1] in rendering
