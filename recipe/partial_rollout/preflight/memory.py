"""Memory by arithmetic: of a run on one device, before activations and what the engine computes with; of a weight sync."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.choices import Placement
from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.config.settings import trainer_devices
from recipe.partial_rollout.preflight.host import GIB
from recipe.partial_rollout.preflight.inputs import model_config
from recipe.partial_rollout.preflight.machine import weight_bytes
from recipe.partial_rollout.preflight.model_shape import ModelShape, largest_matrix

_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2}
_ADAM = 2
"""moments, each of the size of the weights"""
_CHUNK = 1024
"""rows of logits that log-probs and entropy are computed for at once, in float32"""
_CHUNK_COPIES = 4
"""of a chunk: float32 logits, softmax, their gradients"""
RESERVE = 8.0
"""GiB for activations, CUDA contexts and NCCL"""

BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
_LEAST_MIB, _VERLS_MIB = 64, 2048
"""a bucket for small models, and verl's default, for a model whose sizes are not known"""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """GiB on each device."""

    weights: float
    """the trainer's shard; gradients are as large, Adam's moments twice"""
    logits: float
    """of one micro-batch at an update: the model's, their gradient, and what a chunk of them takes in float32"""
    engine_weights: float
    engine: float | None
    """``gpu_memory_utilization`` of the device; None: its memory is not known"""
    kv_tokens: int | None
    """context tokens that the engine's rest holds, of one replica"""

    @property
    def trainer(self) -> float:
        """The trainer's shards at an update: weights, gradients and moments."""
        return (2 + _ADAM) * self.weights

    @classmethod
    def of(cls, config: DictConfig, shape: ModelShape) -> DeviceMemory:
        """For FSDP2; ``recipe.gpu_gib`` says how much memory a device has."""
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        devices = trainer_devices(config)
        fsdp = actor.get("fsdp_config") or {}
        shards = fsdp.get("fsdp_size", -1)
        shards = devices if shards < 1 else min(shards, devices)
        tp = rollout.tensor_model_parallel_size
        engine_weights = shape.parameters * _BYTES.get(str(rollout.dtype), 2) / tp / GIB
        gib = OmegaConf.select(config, "recipe.gpu_gib") if config.trainer.device == "cuda" else None
        engine = None if gib is None else gib * rollout.gpu_memory_utilization
        # Unpacked logits are copied once more, without their padding.
        copies = 2 if config.actor_rollout_ref.model.use_remove_padding else 3
        rows = copies * actor.ppo_max_token_len_per_gpu * _BYTES.get(str(fsdp.get("dtype", "bfloat16")), 2)
        return cls(
            weights=shape.parameters * weight_bytes(config) / shards / GIB,
            logits=(rows + _CHUNK_COPIES * _CHUNK * 4) * shape.vocabulary / GIB,
            engine_weights=engine_weights,
            engine=engine,
            kv_tokens=None if engine is None else max(0, int((engine - engine_weights) * GIB * tp / shape.kv_bytes)),
        )


def check_memory(config: DictConfig, memory: DeviceMemory | None) -> None:
    """Refuse an update that cannot fit a device, alone or beside an engine that does not sleep meanwhile.

    Raises:
        ConfigError: in one line.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if memory is None or memory.engine is None or not str(actor.strategy).startswith("fsdp"):
        return
    gib = config.recipe.gpu_gib
    training = memory.trainer + memory.logits + RESERVE
    what = (
        f"an update takes {training:.0f} GiB of recipe.gpu_gib={gib:g} (weights, gradients and Adam {memory.trainer:.1f}, "
        f"logits {memory.logits:.1f}, {RESERVE:g} for the rest)"
    )
    if training > gib:
        tokens = actor.ppo_max_token_len_per_gpu
        raise fail(
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            tokens,
            f"fewer tokens, more devices, or actor.fsdp_config.model_dtype=bf16: {what}",
        )
    shares = config.partial_rollout.placement != Placement.SEPARATE and not rollout.free_cache_engine
    if shares and training + memory.engine > gib:
        most = (gib - training) / gib
        raise fail(
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            rollout.gpu_memory_utilization,
            f"at most {int(most * 100) / 100:g} with rollout.free_cache_engine=False, because the engine keeps its memory "
            f"while {what}",
        )


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
