"""What a run reads: model, data, packages, Ray cluster. What is missing is named with the command that brings it.

Rows are refused whose prompt is too long (verl's agent loops would cut it on the left, with a warning), or that a
checkpoint cannot hold.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from recipe.partial_rollout.checkpoint.plain_codec import UnsaveableError, pack
from recipe.partial_rollout.config.keys import ConfigError, fail
from recipe.partial_rollout.config.settings import CONF_DIR, engine_devices, trainer_devices
from recipe.partial_rollout.preflight.facts import loggers
from recipe.partial_rollout.waits import one_line

_ROLLOUT = "actor_rollout_ref.rollout"
CPUS_PER_TRAINER, CPUS_PER_ENGINE = 3, 2
"""that verl's placement groups reserve with each device; the second, where engines have devices of their own"""
BUCKET = f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
_LEAST_MIB, _VERLS_MIB = 64, 2048
"""a bucket for small models, and verl's default, for a model whose sizes are not known"""
INSTALL_GPU = "PARTIAL_ROLLOUT_EXTRA=gpu bash run_scripts/setup.sh"
INSTALL_REASONING_GYM = "pip install reasoning-gym==0.1.25"
REASONING_GYM = "pkg://recipe.partial_rollout.tasks.reasoning_gym"
MODEL = "actor_rollout_ref.model.path"
_TURNS = f"{_ROLLOUT}.multi_turn"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PROBE_S = 5.0
"""for the hub to answer; its client would retry for half a minute"""
_BATCH = 512
"""prompts that the tokenizer gets at once; it spreads them over the cores"""
_ROWS = 256
"""rows that are tried, spread over the dataset: its columns have types, but their first rows may be null"""


def missing_inputs(config: DictConfig) -> Iterator[ConfigError]:
    """An error for each input that is not there."""
    for key in _models(config):
        try:
            model_config(str(OmegaConf.select(config, key)), key)
        except ConfigError as error:
            yield error
    for split in ("train", "val"):
        files = config.data[f"{split}_files"]
        for name in [files] if isinstance(files, str) else files:
            if not Path(str(name)).expanduser().is_file():
                yield fail(f"data.{split}_files", name, f"an existing parquet file{_how_to_write(config)}")
    nodes = config.trainer.nnodes
    if nodes > 1 and not (os.environ.get("RAY_ADDRESS") or OmegaConf.select(config, "ray_kwargs.ray_init.address")):
        yield fail(
            "trainer.nnodes",
            nodes,
            "1 (NNODES=1), or a Ray cluster: `ray start --head` on one node, `ray start --address=HEAD:6379` on the "
            "others, then RAY_ADDRESS=auto",
        )


def _models(config: DictConfig) -> Iterator[str]:
    """Keys of the models that a run loads."""
    from verl.trainer.ppo.utils import need_critic

    yield MODEL
    if need_critic(config):
        yield "critic.model.path"
    if config.reward.reward_model.enable:
        yield "reward.reward_model.model_path"


def _how_to_write(config: DictConfig) -> str:
    names = OmegaConf.select(config, "recipe.data_sets")
    if not names:
        return ""
    return f"; `python -m recipe.partial_rollout.tools data {names} --out {config.recipe.data}` writes it (DATA=DIR)"


def model_config(path: str, key: str = MODEL) -> dict[str, Any]:
    """``config.json`` of a local model directory, or of a model of the hub; ``key`` names it in errors.

    Raises:
        ConfigError: it is neither; says how to get it.
    """
    local = Path(path).expanduser() / "config.json"
    if local.is_file():
        try:
            return json.loads(local.read_text())
        except ValueError as error:
            raise fail(key, path, f"a model directory whose config.json is JSON ({one_line(error)})") from error
    if not _HUB_ID.fullmatch(path):
        raise fail(key, path, "a local model directory with config.json, or a model of the hub such as Qwen/Qwen3-4B")
    return json.loads(_of_hub(path, key).read_text())


def reach_hub() -> None:
    """Raises what the hub's client raises, if the hub does not answer in seconds or ``HF_HUB_OFFLINE`` is set."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    get_session().head(constants.ENDPOINT, timeout=_PROBE_S)


def _of_hub(path: str, key: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    try:
        reach_hub()
        return Path(hf_hub_download(path, "config.json"))
    except Exception as error:
        # The client raises what its transport raises; whatever it is, the model is not here.
        remedy = f"`hf download {path} --local-dir DIR` where the hub can be reached, then MODEL=DIR or this key"
        words = "a local model directory with config.json, or a model of the hub, which does not give it"
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no reason given')}"
        raise fail(key, path, f"{words} ({why}): {remedy}") from error


def fetch_model(config: DictConfig) -> None:
    """Download a hub model's files once, with a progress bar, before every worker asks for them.

    Raises:
        ConfigError: the hub does not give them.
    """
    path = str(config.actor_rollout_ref.model.path)
    try:
        local_model(path, offline=False)
    except Exception as error:
        raise fail(MODEL, path, f"a model whose files the hub gives ({type(error).__name__})") from error


def local_model(path: str, *, offline: bool = True) -> Path:
    """The directory of a model, which is local or was downloaded from the hub; unless ``offline`` it is downloaded now."""
    local = Path(path).expanduser()
    if (local / "config.json").is_file():
        return local
    from huggingface_hub import snapshot_download

    left_out = ["*.bin", "*.pth", "*.gguf", "*.onnx", "original/*"]
    return Path(snapshot_download(path, ignore_patterns=left_out, local_files_only=offline))


def check_vocabulary(config: DictConfig) -> None:
    """Refuse a tokenizer with more tokens than the model has embedding rows, and tell of rows beyond its tokens.

    Checkpoints such as Qwen's pad their embeddings. vLLM masks these ids and the trainer does not, so where they are no
    padding log-probs differ.
    """
    from transformers import AutoTokenizer

    model = config.actor_rollout_ref.model
    path = str(model.path)
    config_json = model_config(path)
    rows = (config_json.get("text_config") or config_json).get("vocab_size")
    name = str(model.get("tokenizer_path") or path)
    local = Path(name).expanduser()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(local) if local.is_dir() else name, trust_remote_code=model.get("trust_remote_code", False)
        )
    except Exception as error:
        # transformers raises what the tokenizer's code raises.
        raise fail(MODEL, path, f"a model whose tokenizer loads ({one_line(error)})") from error
    tokens = len(tokenizer)
    if rows is None or tokens == rows:
        return
    said = f"its tokenizer has {tokens} tokens and the model {rows} embedding rows"
    if tokens > rows:
        raise fail(MODEL, path, f"{said}; each token needs one")
    print(f"{MODEL}={path}: {said}; the engine samples none of the {rows - tokens} beyond")


def check_engine(config: DictConfig) -> None:
    """Check that the model has positions for the longest sample, and heads that the engine's devices can share."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    config_json, parts = model_config(str(model.path)), rollout.tensor_model_parallel_size
    text = {**(config_json.get("text_config") or config_json), **(model.get("override_config") or {})}
    most, heads = text.get("max_position_embeddings"), text.get("num_attention_heads")
    asked = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    if most and asked > most:
        words = f"at most {most} with the prompt: the model's max_position_embeddings"
        raise fail(f"{_ROLLOUT}.max_model_len or response_length", asked, words)
    if heads and heads % parts:
        raise fail(f"{_ROLLOUT}.tensor_model_parallel_size", parts, f"a divisor of the model's {heads} attention heads")


def check_critic(config: DictConfig) -> None:
    """Check for tied embeddings beside a critic of mbridge, which would save the critic's head as its embeddings.

    mbridge loads no critic of such a model, and a bridge to one renames the output layer of every other in the process.
    """
    from verl.trainer.ppo.utils import need_critic

    if not OmegaConf.select(config, "critic.megatron.vanilla_mbridge") or not need_critic(config):
        return
    for key in (MODEL, "critic.model.path"):
        path = str(OmegaConf.select(config, key))
        if model_config(path).get("tie_word_embeddings"):
            raise fail(key, path, "a model without tied embeddings, or critic.megatron.vanilla_mbridge=False")


def weight_bytes(config: DictConfig) -> int:
    """Bytes of a weight in the trainer."""
    fsdp = config.actor_rollout_ref.actor.get("fsdp_config") or {}
    return {"fp32": 4, "float32": 4}.get(str(fsdp.get("model_dtype", "fp32")), 2)


def size_bucket(config: DictConfig) -> None:
    """Where ``BUCKET`` is null, set it in place to hold the model's largest tensor; check a number that the user gave.

    On the way into an engine verl packs tensors into a bucket. Where processes share no device memory (a CPU, some NPUs)
    each must fit; with IPC verl sends a larger one by itself.

    Raises:
        ConfigError: the number is too small, or there is no model to read.
    """
    from verl.utils.device import is_support_ipc

    given = OmegaConf.select(config, BUCKET)
    if given is not None and is_support_ipc():
        return
    numbers = largest_matrix(model_config(str(config.actor_rollout_ref.model.path)))
    needed = math.ceil(numbers * weight_bytes(config) / (1 << 20)) if numbers else None
    if given is None:
        OmegaConf.update(config, BUCKET, max(_LEAST_MIB, needed) if needed else _VERLS_MIB)
    elif needed and given < needed:
        raise fail(BUCKET, given, f"at least {needed}, or null: the model's largest tensor must fit the bucket here")


def largest_matrix(config: Mapping[str, Any]) -> int | None:
    """Numbers in the largest matrix of any decoder, embedding or feed-forward; None if its ``config.json`` lacks the sizes.

    >>> largest_matrix({"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536}) * 4 >> 20
    108
    """
    text = config.get("text_config") or config
    rows = max(text.get("vocab_size") or 0, text.get("intermediate_size") or 0)
    return rows * (text.get("hidden_size") or 0) or None


def find_tools(config: DictConfig) -> None:
    """Load the tools that ``config`` names once, and make their files' paths absolute in place, also for the dataset.

    A relative path is verl's (the working directory, or verl's own), or of a file beside ``conf``. verl's workers would
    die of a tool that does not load, and its dataset would measure prompts without it.

    Raises:
        ConfigError: a file is missing, or its tools do not load.
    """
    from verl.tools.tool_registry import load_all_tools

    given = {name: OmegaConf.select(config, f"{_TURNS}.{name}") for name in ("tool_config_path", "function_tool_path")}
    paths = {name: path and _tool_file(f"{_TURNS}.{name}", str(path)) for name, path in given.items()}
    named = [name for name, path in paths.items() if path]
    try:
        # A BaseTool prints its schema.
        with contextlib.redirect_stdout(io.StringIO()):
            load_all_tools(**paths)
    except Exception as error:
        raise fail(
            f"{_TURNS}.{named[0]}", given[named[0]], f"a file whose tools verl can load ({one_line(error)})"
        ) from error
    for name in named:
        OmegaConf.update(config, f"{_TURNS}.{name}", paths[name])
        OmegaConf.update(config, f"data.{name}", paths[name])


def _tool_file(key: str, given: str) -> str:
    from verl.utils.import_utils import resolve_config_path

    with contextlib.suppress(FileNotFoundError):
        given = resolve_config_path(given)
    # An absolute path stays as it is.
    found = CONF_DIR.parent / given
    if not found.is_file():
        raise fail(key, given, "an existing file")
    return str(found)


class Package(NamedTuple):
    """A package that a run imports if ``key`` has ``value``; the command ``brought_by`` installs it."""

    module: str
    key: str
    value: str | bool
    brought_by: str = INSTALL_GPU


PACKAGES = (
    Package("cupy", "actor_rollout_ref.rollout.checkpoint_engine.backend", "nccl"),
    Package("liger_kernel", "actor_rollout_ref.model.use_liger", True, "pip install liger-kernel"),
    Package("transfer_queue", "trainer.v1.trainer_mode", "colocate_async"),
    Package("reasoning_gym", "reward.custom_reward_function.path", REASONING_GYM, INSTALL_REASONING_GYM),
    Package("megatron", "actor_rollout_ref.actor.strategy", "megatron", "pip install -e '.[megatron]'"),
)
"""the optional imports of the documented commands"""
LOGGERS = {name: name for name in ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio", "rl_insight")} | {
    "tracking": "wandb",
    "vemlp_wandb": "volcengine_ml_platform",
}
"""modules that verl's trackers import"""


def missing_packages(config: DictConfig) -> Iterator[ConfigError]:
    """An error for each package that ``config`` needs and this environment lacks."""
    for module, key, value, brought_by in PACKAGES:
        # Every arm has a trainer mode; verl's v1 trainer alone reads it.
        unread = key.startswith("trainer.v1.") and not config.trainer.use_v1
        if OmegaConf.select(config, key) == value and not unread and find_spec(module) is None:
            yield fail(
                key, value, f"another, or the package {module}, which is not installed: `{brought_by}` brings it"
            )
    given = config.trainer.logger
    for name in loggers(given):
        if name in LOGGERS and find_spec(LOGGERS[name]) is None:
            words = f"loggers that are installed; {name} needs `pip install {LOGGERS[name]}`"
            yield fail("trainer.logger", given, words)


# -- devices and CPUs of Ray ---------------------------------------------------------------------------------------------


def check_devices_of_ray(config: DictConfig, available: int) -> None:
    """Refuse a split that needs more devices than Ray's ``available`` ones.

    Raises:
        ConfigError: in one line.
    """
    engines, trainers = engine_devices(config), trainer_devices(config)
    if engines and trainers + engines > available:
        rollout = config.actor_rollout_ref.rollout
        raise fail(
            f"{_ROLLOUT}.n_gpus_per_node",
            rollout.n_gpus_per_node,
            f"with rollout.nnodes={rollout.nnodes} and {trainers} device(s) for the trainer it needs {trainers + engines} "
            f"in Ray, which has {available}",
        )


def cpus_for_ray(config: DictConfig) -> int:
    """CPUs without which Ray would wait for ever to place trainers, engines and the rest."""
    return CPUS_PER_TRAINER * trainer_devices(config) + CPUS_PER_ENGINE * engine_devices(config) + 1


def check_cpus(config: DictConfig, available: int) -> None:
    """Refuse more devices than the ``available`` CPUs of Ray can serve.

    Raises:
        ConfigError: in one line.
    """
    if (needed := cpus_for_ray(config)) > available:
        raise fail(
            "trainer.n_gpus_per_node",
            config.trainer.n_gpus_per_node,
            f"fewer devices, or {needed} CPUs for Ray, which has {available}: verl reserves {CPUS_PER_TRAINER} for a "
            f"device of the trainer and {CPUS_PER_ENGINE} for one of separate engines, and waits for them without end",
        )


# -- rows ----------------------------------------------------------------------------------------------------------------


def check_prompts(config: DictConfig, tokenizer: Any, dataset: Sequence[Any]) -> None:
    """Raise ``ConfigError`` if a prompt is longer than ``data.max_prompt_length`` tokens, unless verl leaves such out."""
    if not config.data.filter_overlong_prompts:
        check_lengths(config, prompt_lengths(config, tokenizer, dataset))


def check_lengths(config: DictConfig, lengths: np.ndarray) -> None:
    """``check_prompts``, of prompts of these ``lengths``."""
    limit = config.data.max_prompt_length
    if config.data.filter_overlong_prompts or (over := int((lengths > limit).sum())) == 0:
        return
    longest = int(lengths.argmax())
    raise fail(
        "data.max_prompt_length",
        limit,
        f"at least {lengths[longest]}, the tokens of row {longest} of data.train_files; {over:,} of {len(lengths):,} "
        f"prompts are longer than {limit} (data.filter_overlong_prompts=True leaves them out)",
    )


def prompt_lengths(config: DictConfig, tokenizer: Any, dataset: Sequence[Any]) -> np.ndarray:
    """int32 [rows of ``dataset``]: tokens of each prompt with the chat template and the dataset's tools."""
    options = config.data.get("apply_chat_template_kwargs") or {}
    tools = getattr(dataset, "tool_schemas", None)
    lengths = np.zeros(len(dataset), np.int32)
    with tqdm(total=len(dataset), desc="prompt lengths", unit=" prompts", leave=False) as bar:
        for start in range(0, len(dataset), _BATCH):
            rows = range(start, min(start + _BATCH, len(dataset)))
            chats = [list(dataset[i]["raw_prompt"]) for i in rows]
            try:
                encoded = tokenizer.apply_chat_template(
                    chats, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True, **options
                )
            except (TemplateError, ValueError) as error:
                where = f"rows {rows.start} to {rows.stop - 1}"
                raise fail(
                    "data.train_files",
                    config.data.train_files,
                    f"prompts that the model's chat template takes; among {where} it refuses one: {one_line(error)}",
                ) from error
            lengths[rows.start : rows.stop] = [len(ids) for ids in encoded["input_ids"]]
            bar.update(len(rows))
    return lengths


def check_rows(config: DictConfig, dataset: Sequence[dict[str, Any]]) -> None:
    """Raise ``ConfigError`` for a column of ``dataset`` that a checkpoint cannot hold."""
    import torch

    if not config.partial_rollout.enable or config.trainer.save_freq <= 0:
        return
    for i in np.linspace(0, len(dataset) - 1, min(len(dataset), _ROWS)).astype(int).tolist():
        try:
            pack({column: value for column, value in dataset[i].items() if not isinstance(value, torch.Tensor)})
        except UnsaveableError as error:
            remedy = "(store it as text, or train without checkpoints: trainer.save_freq=-1)"
            raise fail("data.train_files", config.data.train_files, f"row {i}, column {error} {remedy}") from None
