"""Memory by arithmetic: of a run on one device, before activations and what the engine computes with; of a weight sync."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.devices import trainer_devices
from recipe.partial_rollout.config.errors import fail
from recipe.partial_rollout.preflight.inputs import model_config
from recipe.partial_rollout.preflight.model_shape import ModelShape, largest_matrix

_GIB = 1 << 30
_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2}
_ADAM = 2
"""moments, each of the size of the weights"""

BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
_LEAST_MIB, _VERLS_MIB = 64, 2048
"""a bucket for small models, and verl's default, for a model whose sizes are not known"""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """GiB on each device."""

    weights: float
    """the trainer's shard; gradients are as large, Adam's moments twice"""
    logits: float
    """of one micro-batch in float32"""
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
        engine_weights = shape.parameters * _BYTES.get(str(rollout.dtype), 2) / tp / _GIB
        gib = OmegaConf.select(config, "recipe.gpu_gib") if config.trainer.device == "cuda" else None
        engine = None if gib is None else gib * rollout.gpu_memory_utilization
        return cls(
            weights=shape.parameters * _BYTES.get(str(fsdp.get("model_dtype", "fp32")), 4) / shards / _GIB,
            logits=actor.ppo_max_token_len_per_gpu * shape.vocabulary * 4 / _GIB,
            engine_weights=engine_weights,
            engine=engine,
            kv_tokens=None if engine is None else max(0, int((engine - engine_weights) * _GIB * tp / shape.kv_bytes)),
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
    fsdp = config.actor_rollout_ref.actor.get("fsdp_config") or {}
    needed = math.ceil(numbers * _BYTES.get(str(fsdp.get("model_dtype", "fp32")), 4) / (1 << 20)) if numbers else None
    if given is None:
        OmegaConf.update(config, BUCKET, max(_LEAST_MIB, needed) if needed else _VERLS_MIB)
    elif needed and given < needed:
        raise fail(BUCKET, given, f"at least {needed}, or null: the model's largest tensor must fit the bucket here")
