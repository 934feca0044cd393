"""Check the inputs of a run: model, data, tools, packages, Ray.

An error names the command that brings what is missing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets.config
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from verl.trainer.ppo.utils import need_critic
from verl.utils.torch_dtypes import FLOAT_LIST
from verl.workers.rollout.utils import get_max_position_embeddings

from recipe.partial_rollout.config.keys import ConfigError, fail, leaves, refusing
from recipe.partial_rollout.config.settings import engine_devices, trainer_devices
from recipe.partial_rollout.preflight.rule import at, longest
from recipe.partial_rollout.training.loss import needs_pass
from verl_ext.command import no_device

_ROLLOUT = "actor_rollout_ref.rollout"
CPUS_PER_TRAINER, CPUS_PER_ENGINE = 3, 2
"""CPUs that verl's placement groups reserve with each trainer device, and with each device of separate engines"""
BUCKET = f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
_LEAST_MIB = 64
"""MiB of the smallest bucket, which also serves a model that cannot be built here"""
INSTALL_GPU = "PARTIAL_ROLLOUT_EXTRA=gpu bash run_scripts/setup.sh"
INSTALL_REASONING_GYM = "pip install reasoning-gym==0.1.25"
INSTALL_IMAGES = "pip install --no-deps qwen-vl-utils==0.0.14"
MODEL = "actor_rollout_ref.model.path"
_SUFFIXES = ".parquet", ".json", ".jsonl"
"""of the files that verl's dataset reads"""
_CACHE = Path(datasets.config.HF_DATASETS_CACHE)


def missing_inputs(config: DictConfig) -> Iterator[ConfigError]:
    """An error for each model and data file that is not there."""
    models = {
        MODEL: True,
        "critic.model.path": need_critic(config),
        "reward.reward_model.model_path": config.reward.reward_model.enable,
    }
    for key in (key for key, loaded in models.items() if loaded):
        try:
            check_model(str(at(config, key)), key)
        except ConfigError as error:
            yield error
    sets = at(config, "recipe.data_sets")
    command = f"python -m recipe.partial_rollout.tools data {sets} --out {at(config, 'recipe.data')}"
    words = (
        f"an existing parquet file; `{command}` writes it (DATA=DIR: another folder)"
        if sets
        else "an existing parquet file"
    )
    for key, name in _data_files(config):
        # A dataset class of the user's own may read a folder, or a data set of the hub.
        elsewhere = config.data.custom_cls.path and ("://" in name or Path(name).suffix not in _SUFFIXES)
        # Unlike ``Path``, ``isfile`` takes "file.parquet/" for what it is.
        if not os.path.isfile(name) and not elsewhere:
            yield fail(key, name, words)


def _data_files(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Each data file, with the key that names it."""
    for key in ("data.train_files", "data.val_files"):
        files = at(config, key)
        yield from ((key, str(name)) for name in ([files] if isinstance(files, str) else files))


def cache_by_content(config: DictConfig) -> None:
    """Set the cache folder of ``datasets`` to one named by a hash of the data files' contents.

    In one folder ``datasets`` tells files apart by name and time stamp only. A run on a new file could train the cached
    rows of an old one. Of what is no file, which only a user's own dataset class reads, the name is hashed.
    """
    digest = hashlib.blake2b(digest_size=8)
    for _, name in _data_files(config):
        if not Path(name).is_file():
            digest.update(name.encode())
            continue
        with open(name, "rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    datasets.config.HF_DATASETS_CACHE = _CACHE / digest.hexdigest()


def check_model(path: str, key: str = MODEL) -> None:
    """Check that ``path`` is a local model directory with weights, or a model of the hub; ``key`` names it in errors.

    Raises:
        ConfigError: it is neither; says how to get it.
    """
    from huggingface_hub import hf_hub_download

    local = Path(path) / "config.json"
    words = (
        "a local model directory with config.json, or a model of the hub such as Qwen/Qwen3-4B; if this machine cannot "
        f"reach the hub, run `hf download {path} --local-dir DIR` on one that can, copy DIR here, and set {key}=DIR"
    )
    # The hub's client raises what its transport raises; whatever it is, the model is not here.
    with refusing(key, path, words):
        found = local if local.is_file() else hf_hub_download(path, "config.json")
        json.loads(Path(found).read_text())
    if local.is_file() and not any(each.suffix in (".safetensors", ".bin") for each in local.parent.iterdir()):
        raise fail(key, path, "a model directory with weights (*.safetensors or *.bin); this one has none")


NOISE = re.compile(r"(?!classifier|summary).*(dropout(_p|_prob|_rate)?|pdrop|layerdrop|drop_path_rate|jitter_\w+)")
"""finds the names of dropouts and of routers' noise in a model's config; heads that are not trained do not matter"""


def check_noise(config: DictConfig, layout: PretrainedConfig) -> None:
    """Check that a forward pass of the update has the log-probs of the policy, if no other pass gives them.

    Args:
        layout: the model's own config, with ``model.override_config``.

    Raises:
        ConfigError: the model has a dropout or a router's noise, which only an update applies.
    """
    if needs_pass(config):
        return
    for name, value in leaves(layout.to_dict()):
        if NOISE.fullmatch(name.rpartition(".")[2]) and isinstance(value, float) and value > 0:
            words = f"a model without noise (its config has {name}={value}, which makes the update's log-probs random)"
            remedy = f"+actor_rollout_ref.model.override_config.{name}=0.0"
            raise fail(MODEL, config.actor_rollout_ref.model.path, f"{words}; or set {remedy}")


def check_positions(config: DictConfig, layout: PretrainedConfig) -> None:
    """Check that prompt and response fit the model's positions if ``max_model_len`` is null: verl would cut responses.

    Raises:
        ConfigError: they do not, or the model's config has no ``max_position_embeddings``, which verl's engine reads.
    """
    with refusing(MODEL, config.actor_rollout_ref.model.path, "a model whose config has max_position_embeddings"):
        positions = get_max_position_embeddings(layout)
    rollout = config.actor_rollout_ref.rollout
    if rollout.max_model_len is None and longest(config) > positions:
        words = f"with prompt_length={rollout.prompt_length} it must fit the {positions:,} positions of the model"
        raise fail(f"{_ROLLOUT}.response_length", rollout.response_length, words)


def weight_bytes(config: DictConfig) -> int:
    """Return the bytes of one weight in the trainer: 4 or 2."""
    dtype = at(config, "actor.fsdp_config.model_dtype")
    # verl trains null in float32.
    return 4 if dtype is None or dtype in FLOAT_LIST else 2


def size_bucket(config: DictConfig) -> None:
    """Set ``BUCKET`` in place to hold the model's largest tensor, if it is null.

    On the way into an engine verl packs tensors into a bucket. Where processes share no device memory (a CPU, some
    NPUs) each tensor must fit.
    """
    if at(config, BUCKET) is None:
        numbers = max((each.numel() for each in without_weights(config).parameters()), default=0)
        needed = math.ceil(numbers * weight_bytes(config) / (1 << 20))
        OmegaConf.update(config, BUCKET, max(_LEAST_MIB, needed))


def without_weights(config: DictConfig) -> torch.nn.Module:
    """Build the model on torch's meta device, so that it has shapes but no weights.

    Return an empty module if transformers cannot build it from its config, for example because the model's own code
    imports a missing package. The worker that loads the model will report that.
    """
    model = config.actor_rollout_ref.model
    remote = {"trust_remote_code": model.get("trust_remote_code", False)}
    try:
        layout = AutoConfig.from_pretrained(model.path, **remote)
        with torch.device("meta"):
            seeing = type(layout) in AutoModelForImageTextToText._model_mapping
            kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
            return kind.from_config(layout, **remote)
    except Exception:
        return torch.nn.Module()


PACKAGES = (
    ("cupy", "actor_rollout_ref.rollout.checkpoint_engine.backend", "nccl", INSTALL_GPU),
    ("liger_kernel", "actor_rollout_ref.model.use_liger", True, "pip install liger-kernel"),
    ("transfer_queue", "trainer.use_v1", True, INSTALL_GPU),
    (
        "reasoning_gym",
        "reward.custom_reward_function.path",
        "pkg://recipe.partial_rollout.tasks.reasoning_gym",
        INSTALL_REASONING_GYM,
    ),
    ("megatron", "actor_rollout_ref.actor.strategy", "megatron", "pip install -e '.[megatron]'"),
    ("sglang", "actor_rollout_ref.rollout.name", "sglang", "pip install sglang"),
    *(
        (name, "actor_rollout_ref.rollout.trace.backend", name, f"pip install {name}")
        for name in ("mlflow", "trackio", "weave")
    ),
    *(
        (name, "trainer.logger", name, f"pip install {name}")
        for name in ("swanlab", "wandb", "mlflow", "tensorboard", "clearml", "trackio")
    ),
)
"""(module, key, value of the key that needs the module, command that installs it); else a run fails with its engines
up"""


def missing_packages(config: DictConfig) -> Iterator[ConfigError]:
    """An error for each package that ``config`` needs and this environment lacks."""
    for module, key, value, brought_by in PACKAGES:
        given = at(config, key)
        if value in (given if OmegaConf.is_list(given) else [given]) and not is_installed(module):
            words = f"which is not installed, or is hidden by a folder ./{module}: `{brought_by}` installs it"
            yield fail(key, value, f"another value, or the package {module}, {words}")


def is_installed(module: str) -> bool:
    """Whether Python finds ``module``, and not just a folder of its name in the working directory, such as ``./wandb``."""
    spec = find_spec(module)
    return spec is not None and Path.cwd() not in [Path(each).parent for each in spec.submodule_search_locations or ()]


# -- devices, and Ray ----------------------------------------------------------------------------------------------------

_SIZES = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
"""options of ``ray.init`` that set the size of a new Ray; Ray refuses them for a run that joins a cluster"""
_ANSWERS_S = 2.0
"""seconds in which a Ray cluster must accept the connection that tests its address"""


def check_device(config: DictConfig) -> None:
    """Raise ``ConfigError`` where no training on ``trainer.device`` can start from this process."""
    if problem := no_device(config.trainer.device, at(config, "ray_kwargs.ray_init.address")):
        raise ConfigError(problem)


def ray_options(config: DictConfig) -> dict[str, Any]:
    """``ray_kwargs.ray_init`` as Ray takes it.

    If ``RAY_ADDRESS`` or the address names a cluster, the options of size are left out. If neither does and the config
    has such options, ``address="local"`` starts a new Ray, although another one may run on this machine.
    """
    options: Any = OmegaConf.to_container(config.ray_kwargs.get("ray_init", {}), resolve=True)
    unsized = {name: value for name, value in options.items() if name not in _SIZES or value is None}
    if (options.get("address") or os.environ.get("RAY_ADDRESS") or "local") != "local":
        return unsized
    return options if unsized == options else {**options, "address": "local"}


def check_ray_address(config: DictConfig) -> None:
    """Check that the Ray cluster that a run would join takes connections: Ray itself tries for over a minute.

    Raises:
        ConfigError: it takes none within two seconds, or the address has no port.
    """
    key, address = "ray_kwargs.ray_init.address", ray_options(config).get("address") or "auto"
    if address == "auto":
        # RAY_ADDRESS decides. Without it Ray looks for a cluster of this machine, whose address is not known here.
        key, address = "RAY_ADDRESS", os.environ.get("RAY_ADDRESS") or address
    place = address.removeprefix("ray://")
    # Ray asks a plugin about other schemes.
    if place in ("auto", "local") or "://" in place or ray.is_initialized():
        return
    words = "HOST:PORT of a Ray cluster that answers, auto for one of this machine, or local for a new one"
    with refusing(key, address, words, (ValueError, OSError)):
        host, _, port = place.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_S).close()


def cpus_for_ray(config: DictConfig) -> int:
    """CPUs without which Ray would wait for ever to place trainers, engines and the rest."""
    queue = 1 + config.transfer_queue.backend.SimpleStorage.num_data_storage_units if config.trainer.use_v1 else 0
    return CPUS_PER_TRAINER * trainer_devices(config) + CPUS_PER_ENGINE * engine_devices(config) + queue + 1


def check_cluster(config: DictConfig, has: Mapping[str, float]) -> None:
    """Raise ``ConfigError`` where Ray, which ``has`` these resources, would wait for more devices or CPUs without end."""
    engines, trainers, rollout = engine_devices(config), trainer_devices(config), config.actor_rollout_ref.rollout
    gpus, cpus = has.get("GPU", 0), has.get("CPU", 0)
    if engines and trainers + engines > gpus:
        raise fail(
            f"{_ROLLOUT}.n_gpus_per_node",
            rollout.n_gpus_per_node,
            f"with rollout.nnodes={rollout.nnodes} and {trainers} trainer device(s) the run needs "
            f"{trainers + engines} devices in Ray, which has {gpus:g}",
        )
    if (needed := cpus_for_ray(config)) > cpus:
        raise fail(
            "trainer.n_gpus_per_node",
            config.trainer.n_gpus_per_node,
            f"fewer devices, or {needed} CPUs for Ray, which has {cpus:g}: verl reserves {CPUS_PER_TRAINER} CPUs for each "
            f"trainer device and {CPUS_PER_ENGINE} for each device of separate engines, and would wait for them for ever",
        )
