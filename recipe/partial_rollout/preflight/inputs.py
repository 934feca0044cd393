"""What a run needs: model, data, tools, packages, Ray. What is missing is named with the command that brings it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from verl.trainer.ppo.utils import need_critic
from verl.utils.torch_dtypes import FLOAT_LIST

from recipe.partial_rollout.config.keys import ConfigError, fail, refusing
from recipe.partial_rollout.config.settings import V1_MODE, engine_devices, trainer_devices, verls_own
from recipe.partial_rollout.preflight.facts import at, loggers, trains_adapters
from verl_ext.guard import UnsupportedVersionError
from verl_ext.v1 import has_queue

_ROLLOUT = "actor_rollout_ref.rollout"
CPUS_PER_TRAINER, CPUS_PER_ENGINE = 3, 2
"""that verl's placement groups reserve with each device; the second, where engines have devices of their own"""
BUCKET = f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
_LEAST_MIB, _VERLS_MIB = 64, 2048
"""a bucket for small models, and verl's default, for a model that cannot be built here"""
INSTALL_GPU = "PARTIAL_ROLLOUT_EXTRA=gpu bash run_scripts/setup.sh"
INSTALL_REASONING_GYM = "pip install reasoning-gym==0.1.25"
REASONING_GYM = "pkg://recipe.partial_rollout.tasks.reasoning_gym"
MODEL = "actor_rollout_ref.model.path"
_PROBE_S = 5.0
"""for the hub to answer; its client would retry for half a minute"""


def missing_inputs(config: DictConfig) -> Iterator[ConfigError]:
    """An error for each input that is not there."""
    for key, name in _models(config):
        try:
            model_config(str(at(config, key)), key, name)
        except ConfigError as error:
            yield error
    for key, name in data_files(config):
        if not Path(name).is_file():
            yield fail(key, name, f"an existing parquet file{_how_to_write(config)}")
    nodes = config.trainer.nnodes
    if nodes > 1 and not (os.environ.get("RAY_ADDRESS") or at(config, "ray_kwargs.ray_init.address")):
        yield fail(
            "trainer.nnodes",
            nodes,
            "1 (NNODES=1), or a Ray cluster: `ray start --head` on one node, `ray start --address=HEAD:6379` on the "
            "others, then RAY_ADDRESS=auto",
        )


def _models(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Keys of the models that a run loads, and the file that says what each is."""
    yield MODEL, "config.json"
    if need_critic(config):
        yield "critic.model.path", "config.json"
    if config.reward.reward_model.enable:
        yield "reward.reward_model.model_path", "config.json"
    for name, file in (("hf_config_path", "config.json"), ("lora_adapter_path", "adapter_config.json")):
        if config.actor_rollout_ref.model.get(name):
            yield f"actor_rollout_ref.model.{name}", file


def data_files(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Key and name of each data file."""
    for key in ("data.train_files", "data.val_files"):
        files = at(config, key)
        for name in [files] if isinstance(files, str) else files:
            yield key, str(name)


def _how_to_write(config: DictConfig) -> str:
    names = at(config, "recipe.data_sets")
    if not names:
        return ""
    return f"; `python -m recipe.partial_rollout.tools data {names} --out {config.recipe.data}` writes it (DATA=DIR)"


def model_config(path: str, key: str = MODEL, name: str = "config.json") -> dict[str, Any]:
    """File ``name`` of a local model directory, or of a model of the hub; ``key`` names it in errors.

    Raises:
        ConfigError: it is neither; says how to get it.
    """
    # Of a config alone verl takes the file, too.
    local = Path(path) if key.endswith("hf_config_path") and Path(path).is_file() else Path(path) / name
    words = (
        f"a local model directory with {name}, or a model of the hub such as Qwen/Qwen3-4B; where the hub cannot be "
        f"reached, `hf download {path} --local-dir DIR` elsewhere, then MODEL=DIR or this key"
    )
    # The hub's client raises what its transport raises; whatever it is, the model is not here.
    with refusing(key, path, words):
        return json.loads((local if local.is_file() else _of_hub(path, name)).read_text())


def reach_hub() -> None:
    """Raises what the hub's client raises, if the hub does not answer in seconds or ``HF_HUB_OFFLINE`` is set."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    get_session().head(constants.ENDPOINT, timeout=_PROBE_S)


def _of_hub(path: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(path, name)
    if isinstance(cached, str):
        return Path(cached)
    reach_hub()
    return Path(hf_hub_download(path, name))


def fetch_model(config: DictConfig) -> None:
    """Download a hub model's files once, with a progress bar, before every worker asks for them.

    Raises:
        ConfigError: the hub does not give them.
    """
    path = str(config.actor_rollout_ref.model.path)
    with refusing(MODEL, path, "a model whose files the hub gives"):
        local_model(path, offline=False)


def local_model(path: str, *, offline: bool = True) -> Path:
    """The directory of a model, which is local or was downloaded from the hub; unless ``offline`` it is downloaded now."""
    if (Path(path) / "config.json").is_file():
        return Path(path)
    from huggingface_hub import snapshot_download

    left_out = ["*.bin", "*.pth", "*.gguf", "*.onnx", "original/*"]
    return Path(snapshot_download(path, ignore_patterns=left_out, local_files_only=offline))


def check_model(config: DictConfig) -> None:
    """Check the model against tokenizer, engine, critic and weight sync."""
    check_vocabulary(config)
    _check_engine(config)
    check_critic(config)
    _check_adapters(config)
    size_bucket(config)


def check_vocabulary(config: DictConfig) -> None:
    """Refuse a tokenizer with more tokens than the model has embedding rows, and tell of rows beyond its tokens.

    Checkpoints such as Qwen's pad their embeddings. vLLM masks these ids and the trainer does not, so where they are no
    padding log-probs differ.
    """
    model = config.actor_rollout_ref.model
    path = str(model.path)
    config_json = model_config(path)
    rows = (config_json.get("text_config") or config_json).get("vocab_size")
    name = model.get("tokenizer_path") or path
    with refusing(MODEL, path, "a model whose tokenizer loads"):
        tokens = len(AutoTokenizer.from_pretrained(name, trust_remote_code=model.get("trust_remote_code", False)))
    if rows is None or tokens == rows:
        return
    said = f"its tokenizer has {tokens} tokens and the model {rows} embedding rows"
    if tokens > rows:
        raise fail(MODEL, path, f"{said}; each token needs one")
    print(f"{MODEL}={path}: {said}; the engine samples none of the {rows - tokens} beyond")


def _check_engine(config: DictConfig) -> None:
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
    if not at(config, "critic.megatron.vanilla_mbridge") or not need_critic(config):
        return
    for key in (MODEL, "critic.model.path"):
        path = str(at(config, key))
        if model_config(path).get("tie_word_embeddings"):
            raise fail(key, path, "a model without tied embeddings, or critic.megatron.vanilla_mbridge=False")


def _check_adapters(config: DictConfig) -> None:
    """Check that LoRA finds modules of the names it is to adapt; Megatron has names of its own."""
    model = config.actor_rollout_ref.model
    targets = model.get("target_modules")
    trains_new = trains_adapters(config) and not model.get("lora_adapter_path")
    if not trains_new or targets in (None, "all-linear") or config.actor_rollout_ref.actor.strategy == "megatron":
        return
    modules = dict(without_weights(config).named_modules())
    adapters = LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets))
    if len(modules) > 1 and not any(check_target_module_exists(adapters, name) for name in modules):
        found = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
        words = f"all-linear, or some of {', '.join(sorted(found))}, or a pattern of their names"
        raise fail("actor_rollout_ref.model.target_modules", targets, words)


def weight_bytes(config: DictConfig) -> int:
    """Bytes of a weight in the trainer."""
    fsdp = config.actor_rollout_ref.actor.get("fsdp_config") or {}
    dtype = fsdp.get("model_dtype")
    # verl trains null in float32.
    return 4 if dtype is None or dtype in FLOAT_LIST else 2


def size_bucket(config: DictConfig) -> None:
    """Where ``BUCKET`` is null, set it in place to hold the model's largest tensor; check a number that the user gave.

    On the way into an engine verl packs tensors into a bucket. Where processes share no device memory (a CPU, some NPUs)
    each must fit; with IPC verl sends a larger one by itself.

    Raises:
        ConfigError: the number is too small.
    """
    from verl.utils.device import is_support_ipc

    given = at(config, BUCKET)
    if given is not None and is_support_ipc():
        return
    numbers = max((each.numel() for each in without_weights(config).parameters()), default=0)
    needed = math.ceil(numbers * weight_bytes(config) / (1 << 20))
    if given is None:
        OmegaConf.update(config, BUCKET, max(_LEAST_MIB, needed) if needed else _VERLS_MIB)
    elif given < needed:
        raise fail(BUCKET, given, f"at least {needed}, or null: the model's largest tensor must fit the bucket here")


def without_weights(config: DictConfig) -> torch.nn.Module:
    """The model's modules, on torch's meta device; an empty one where transformers cannot build it from its config.

    A model of another kind, or one that lacks what its own code imports, is its worker's to tell of.
    """
    model = config.actor_rollout_ref.model
    remote = {"trust_remote_code": model.get("trust_remote_code", False)}
    try:
        layout = AutoConfig.from_pretrained(model.path, **remote)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(layout, **remote)
    except Exception:
        return torch.nn.Module()


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
    Package("transfer_queue", "trainer.v1.trainer_mode", V1_MODE),
    Package("reasoning_gym", "reward.custom_reward_function.path", REASONING_GYM, INSTALL_REASONING_GYM),
    Package("megatron", "actor_rollout_ref.actor.strategy", "megatron", "pip install -e '.[megatron]'"),
    Package("sglang", "actor_rollout_ref.rollout.name", "sglang", "pip install sglang"),
    *(
        Package(name, "actor_rollout_ref.rollout.trace.backend", name, f"pip install {name}")
        for name in ("mlflow", "trackio", "weave")
    ),
)
"""optional imports, which a run would make once its engines are started"""
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
        if at(config, key) == value and not unread and find_spec(module) is None:
            words = f"another, or the package {module}, which is not installed: `{brought_by}` brings it"
            yield fail(key, value, words)
    if config.trainer.use_v1 and not verls_own(config):
        try:
            has_queue("v1.bound_controller")
        except UnsupportedVersionError as error:
            yield fail("trainer.use_v1", True, f"False, or {error}")
    given = config.trainer.logger
    for name in loggers(given):
        if name in LOGGERS and find_spec(LOGGERS[name]) is None:
            yield fail(
                "trainer.logger", given, f"loggers that are installed; {name} needs `pip install {LOGGERS[name]}`"
            )


# -- devices and CPUs of Ray ---------------------------------------------------------------------------------------------


def cpus_for_ray(config: DictConfig) -> int:
    """CPUs without which Ray would wait for ever to place trainers, engines and the rest."""
    queue = 1 + config.transfer_queue.backend.SimpleStorage.num_data_storage_units if config.trainer.use_v1 else 0
    return CPUS_PER_TRAINER * trainer_devices(config) + CPUS_PER_ENGINE * engine_devices(config) + queue + 1


def check_cluster(config: DictConfig, has: Mapping[str, float]) -> None:
    """Raise ``ConfigError`` where Ray, which ``has`` these resources, would wait for more devices or CPUs without end."""
    engines, trainers, rollout = engine_devices(config), trainer_devices(config), config.actor_rollout_ref.rollout
    gpus, cpus = has.get("GPU", 0), has.get("CPU", 0)
    if engines and trainers + engines > gpus:
        words = (
            f"with rollout.nnodes={rollout.nnodes} and {trainers} device(s) for the trainer it needs "
            f"{trainers + engines} in Ray, which has {gpus:g}"
        )
        raise fail(f"{_ROLLOUT}.n_gpus_per_node", rollout.n_gpus_per_node, words)
    if (needed := cpus_for_ray(config)) > cpus:
        words = (
            f"fewer devices, or {needed} CPUs for Ray, which has {cpus:g}: verl reserves {CPUS_PER_TRAINER} for a "
            f"device of the trainer and {CPUS_PER_ENGINE} for one of separate engines, and waits for them without end"
        )
        raise fail("trainer.n_gpus_per_node", config.trainer.n_gpus_per_node, words)
