"""What a run needs: model, data, tools, packages, Ray. What is missing is named with the command that brings it."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import ray
import torch
from omegaconf import DictConfig, OmegaConf
from ray._private import services
from transformers import AutoConfig, AutoModelForCausalLM
from verl.trainer.ppo.utils import need_critic
from verl.utils.torch_dtypes import FLOAT_LIST

from recipe.partial_rollout.config.keys import ConfigError, fail, refusing
from recipe.partial_rollout.config.settings import V1_MODE, engine_devices, trainer_devices, verls_own
from recipe.partial_rollout.preflight.facts import at
from verl_ext.command import no_device
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
    models = {
        MODEL: True,
        "critic.model.path": need_critic(config),
        "reward.reward_model.model_path": config.reward.reward_model.enable,
    }
    for key in (key for key, loaded in models.items() if loaded):
        try:
            model_config(str(at(config, key)), key)
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


def model_config(path: str, key: str = MODEL) -> dict[str, Any]:
    """``config.json`` of a local model directory, or of a model of the hub; ``key`` names it in errors.

    Raises:
        ConfigError: it is neither; says how to get it.
    """
    local = Path(path) / "config.json"
    words = (
        "a local model directory with config.json, or a model of the hub such as Qwen/Qwen3-4B; where the hub cannot be "
        f"reached, `hf download {path} --local-dir DIR` elsewhere, then MODEL=DIR or this key"
    )
    # The hub's client raises what its transport raises; whatever it is, the model is not here.
    with refusing(key, path, words):
        return json.loads((local if local.is_file() else _of_hub(path)).read_text())


def reach_hub() -> None:
    """Raises what the hub's client raises, if the hub does not answer in seconds or ``HF_HUB_OFFLINE`` is set."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    get_session().head(constants.ENDPOINT, timeout=_PROBE_S)


def _of_hub(path: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    reach_hub()
    return Path(hf_hub_download(path, "config.json"))


def fetch_model(config: DictConfig) -> None:
    """Download a hub model's files once, with a progress bar, before every worker asks for them.

    Raises:
        ConfigError: the hub does not give them.
    """
    path = str(config.actor_rollout_ref.model.path)
    if (Path(path) / "config.json").is_file():
        return
    from huggingface_hub import snapshot_download

    left_out = ["*.bin", "*.pth", "*.gguf", "*.onnx", "original/*"]
    with refusing(MODEL, path, "a model whose files the hub gives"):
        snapshot_download(path, ignore_patterns=left_out)


def weight_bytes(config: DictConfig) -> int:
    """Bytes of a weight in the trainer."""
    fsdp = config.actor_rollout_ref.actor.get("fsdp_config") or {}
    dtype = fsdp.get("model_dtype")
    # verl trains null in float32.
    return 4 if dtype is None or dtype in FLOAT_LIST else 2


def size_bucket(config: DictConfig) -> None:
    """Where ``BUCKET`` is null, set it in place to hold the model's largest tensor.

    On the way into an engine verl packs tensors into a bucket. Where processes share no device memory (a CPU, some NPUs)
    each tensor must fit.
    """
    if at(config, BUCKET) is None:
        numbers = max((each.numel() for each in without_weights(config).parameters()), default=0)
        needed = math.ceil(numbers * weight_bytes(config) / (1 << 20))
        OmegaConf.update(config, BUCKET, max(_LEAST_MIB, needed) if needed else _VERLS_MIB)


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


# -- devices, and Ray ----------------------------------------------------------------------------------------------------

_SIZES = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
"""options of ``ray.init`` that give a Ray of the run's own its size, and which Ray refuses for a cluster that is joined"""
_ANSWERS_S = 2.0
_CLIENT_PORT = 10001
"""Ray's, for ``ray://HOST``"""


def check_device(config: DictConfig) -> None:
    """Raise ``ConfigError`` where no training on ``trainer.device`` can start from this process."""
    if problem := no_device(config.trainer.device, at(config, "ray_kwargs.ray_init.address")):
        raise ConfigError(problem)


def sizes_of(options: Mapping[str, Any]) -> list[str]:
    """Options of ``ray.init`` that size Ray."""
    return [name for name in _SIZES if options.get(name) is not None]


def ray_options(config: DictConfig) -> dict[str, Any]:
    """``ray_kwargs.ray_init``; its address is ``local`` where it sizes Ray and nobody names a cluster."""
    options: Any = OmegaConf.to_container(config.ray_kwargs.get("ray_init", {}), resolve=True)
    named = options.get("address") or os.environ.get("RAY_ADDRESS")
    return {**options, "address": "local"} if sizes_of(options) and named in (None, "", "local") else options


def check_ray_address(config: DictConfig) -> None:
    """Check that the Ray cluster that a run would join takes connections: Ray itself tries for over a minute.

    Raises:
        ConfigError: it takes none within two seconds, or the address is malformed.
    """
    options = ray_options(config)
    key, address, named = "ray_kwargs.ray_init.address", options.get("address"), os.environ.get("RAY_ADDRESS")
    if address in (None, "", "auto") and named:
        key, address = "RAY_ADDRESS", named
    scheme, is_url, place = str(address or "").rpartition("://")
    # Ray asks a plugin about other schemes.
    if ray.is_initialized() or address == "local" or scheme not in ("", "ray"):
        return
    words = "HOST:PORT of a Ray cluster that answers, auto for one of this machine, or local for a new one"
    with refusing(key, address, words, (ValueError, OSError)):
        if address in (None, "", "auto"):
            place = services.canonicalize_bootstrap_address(address or None, options.get("_temp_dir"))  # type: ignore[arg-type]
        if not place:
            return
        parts = urlsplit(f"//{place}")
        port = parts.port or (_CLIENT_PORT if is_url else None)
        if not (parts.hostname and port):
            raise ValueError("it lacks a host or a port")
        socket.create_connection((parts.hostname, port), _ANSWERS_S).close()


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
