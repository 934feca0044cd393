"""Memory by arithmetic: a dense decoder's size, from its ``config.json`` or its name; a run's on one device.

What activations take, and what the engine computes with, is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.keys import ConfigError, fail
from recipe.partial_rollout.config.settings import Placement, trainer_devices
from recipe.partial_rollout.preflight.inputs import model_config, weight_bytes

GIB = 1 << 30
STATE = 3
"""weights and Adam's two moments, each of the size of the weights"""
_DENSE = ("qwen3", "qwen2", "llama", "mistral")
_BYTES = {"fp32": 4, "float32": 4, "float": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2}
_CHUNK = 1024
"""rows of logits that log-probs and entropy are computed for at once, in float32"""
_CHUNK_COPIES = 4
"""of a chunk: float32 logits, softmax, their gradients"""
_RESERVE = 8.0
"""GiB for activations, CUDA contexts and NCCL"""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with gated feed-forward layers and grouped-query attention.

    >>> f"{named('Qwen/Qwen3-4B').parameters / 1e9:.2f}", named("Qwen/Qwen3-0.6B").kv_bytes // 1024
    ('4.02', 112)
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """whether input and output embeddings are one matrix"""

    @property
    def parameters(self) -> int:
        """Weights of matrices and norms; biases, of which Qwen3 has none, are left out."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        norms = 2 * self.hidden + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + norms
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values of one token, in two bytes a number."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """From ``config.json``; None for an architecture that is not of this kind."""
        if config.get("model_type") not in _DENSE:
            return None
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            return cls(
                layers=config["num_hidden_layers"],
                hidden=hidden,
                intermediate=config["intermediate_size"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                vocabulary=config["vocab_size"],
                tied=config.get("tie_word_embeddings", False),
            )
        except KeyError:
            return None


QWEN3 = {
    "0.6B": ModelShape(28, 1024, 3072, 16, 8, 128, 151_936, True),
    "1.7B": ModelShape(28, 2048, 6144, 16, 8, 128, 151_936, True),
    "4B": ModelShape(36, 2560, 9728, 32, 8, 128, 151_936, True),
    "8B": ModelShape(36, 4096, 12_288, 32, 8, 128, 151_936, False),
    "14B": ModelShape(40, 5120, 17_408, 40, 8, 128, 151_936, False),
    "32B": ModelShape(64, 5120, 25_600, 64, 8, 128, 151_936, False),
}
"""the dense models of arXiv:2505.09388, whose config.json is not at hand before they are downloaded"""


def named(path: str) -> ModelShape | None:
    """The shape of a Qwen3 model by the last part of its path or hub id; None for any other name."""
    found = re.fullmatch(r"Qwen3-([\d.]+B)(-[\w-]+)?", path.rstrip("/").rsplit("/", 1)[-1])
    return QWEN3.get(found[1]) if found and not re.search(r"-A\d", found[0]) else None


def shape_of(config: DictConfig) -> ModelShape | None:
    """The model's shape by its ``config.json``, or by its name where it is not at hand; None if neither says it."""
    path = str(config.actor_rollout_ref.model.path)
    try:
        return ModelShape.of(model_config(path))
    except ConfigError:
        return named(path)


def checkpoint_gib(config: DictConfig, parameters: int) -> float:
    """Size of one checkpoint of FSDP: weights and moments of all shards."""
    return parameters * weight_bytes(config) * STATE / GIB


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
        return (1 + STATE) * self.weights

    @classmethod
    def of(cls, config: DictConfig, shape: ModelShape) -> Self:
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
    gib, key = config.recipe.gpu_gib, "ppo_max_token_len_per_gpu"
    training = memory.trainer + memory.logits + _RESERVE
    what = (
        f"an update takes {training:.0f} GiB of recipe.gpu_gib={gib:g} (weights, gradients and Adam {memory.trainer:.1f}, "
        f"logits {memory.logits:.1f}, {_RESERVE:g} for the rest)"
    )
    if training > gib:
        allowed = f"fewer tokens, more devices, or actor.fsdp_config.model_dtype=bf16: {what}"
        raise fail(f"actor_rollout_ref.actor.{key}", actor[key], allowed)
    shares = config.partial_rollout.placement != Placement.SEPARATE and not rollout.free_cache_engine
    if shares and training + memory.engine > gib:
        most = int((gib - training) / gib * 100) / 100
        raise fail(
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            rollout.gpu_memory_utilization,
            f"at most {most:g} with rollout.free_cache_engine=False, because the engine keeps its memory while {what}",
        )
