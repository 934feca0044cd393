"""Memory of a device by arithmetic: the sums of what lies on it at an update, and when the engine wakes.

The order is verl's (``engine_workers.py``): the optimizer steps, gradients are freed, offloaded state goes to the host, the
engine's weights are mapped and filled, then its KV cache is. From then on the engine has its whole share again, beside
what the trainer has not offloaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig, get_peft_model

from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.config.settings import engine_devices, lora_rank, trainer_devices
from recipe.partial_rollout.preflight.inputs import weight_bytes, without_weights

GIB = 1 << 30
STATE = 3
"""weights and Adam's two moments, each of the size of the weights"""
_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
_CHUNK = 1024
"""rows of logits that log-probs and entropy are computed for at once, in float32"""
_CHUNK_COPIES = 4
"""float32 arrays that such a chunk needs: logits, softmax, and the gradients of both"""
_ACTIVATIONS = 6.0
"""GiB for the layers' activations at an update"""
_CONTEXT = 2.0
"""GiB for the trainer's CUDA context and NCCL, which the engine's share does not cover"""


class ModelSize(NamedTuple):
    """The size of a model, from its own config."""

    parameters: int
    trained: int
    """number of parameters that are trained; under LoRA the adapters' alone"""
    vocabulary: int

    @classmethod
    def of(cls, config: DictConfig) -> Self | None:
        """None where transformers cannot build the model from its config."""
        model, trained = config.actor_rollout_ref.model, without_weights(config)
        head = getattr(trained, "get_output_embeddings", lambda: None)()
        if head is None:
            return None
        if rank := lora_rank(config):
            # Megatron fuses some layers, and has other names for them.
            given: Any = model.target_modules if model.lora_rank else "all-linear"
            targets = given if isinstance(given, str) else list(given)
            adapters = LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=targets)
            with torch.device("meta"):
                trained = get_peft_model(trained, adapters)
        counts = [(each.numel(), each.requires_grad) for each in trained.parameters()]
        return cls(
            sum(count for count, _ in counts), sum(count for count, trains in counts if trains), head.out_features
        )


def checkpoint_gib(config: DictConfig, size: ModelSize) -> float:
    """Size of one checkpoint of FSDP: weights and moments of all shards."""
    return (size.parameters + (STATE - 1) * size.trained) * weight_bytes(config) / GIB


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Estimated memory on each device of an FSDP trainer at two moments, in GiB by use: ``{"weights": 1.9, ...}``."""

    update: dict[str, float]
    """at an update"""
    wake: dict[str, float]
    """when the engine wakes; empty where engines have devices of their own"""

    @classmethod
    def of(cls, config: DictConfig, size: ModelSize | None) -> Self | None:
        """None if a device's memory (``recipe.gpu_gib``) or the model's size is not known, or the trainer is not FSDP."""
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        gib = OmegaConf.select(config, "recipe.gpu_gib") if config.trainer.device == "cuda" else None
        if size is None or gib is None or not str(actor.strategy).startswith("fsdp"):
            return None
        fsdp, devices = actor.fsdp_config, trainer_devices(config)
        shards = min(fsdp.fsdp_size, devices) if fsdp.fsdp_size > 0 else devices
        # FSDP2's own offloading keeps all of it on the host; the micro-batch then fetches layer by layer.
        each = 0.0 if fsdp.offload_policy else weight_bytes(config) / shards / GIB
        weights, trained = size.parameters * each, size.trained * each
        # Unpacked logits are copied once more, without their padding.
        copies = 2 if config.actor_rollout_ref.model.use_remove_padding else 3
        rows = copies * actor.ppo_max_token_len_per_gpu * _BYTES.get(str(fsdp.dtype), 2)
        logits = (rows + _CHUNK_COPIES * _CHUNK * 4) * size.vocabulary / GIB
        state = {"weights": weights, "gradients": trained, "Adam": 2 * trained}
        update = state | {"logits": logits, "activations": _ACTIVATIONS, "CUDA and NCCL": _CONTEXT}
        if engine_devices(config):
            return cls(update, {})
        # vLLM claims a share of the whole device, whatever else lies there.
        engine = {"engine": gib * rollout.gpu_memory_utilization}
        if not rollout.free_cache_engine:
            update |= engine
        stays = {"weights": not fsdp.param_offload, "Adam": not fsdp.optimizer_offload}
        wake = {name: state[name] for name, on_device in stays.items() if on_device}
        return cls(update, engine | wake | {"CUDA and NCCL": _CONTEXT})

    def check(self, config: DictConfig) -> None:
        """Refuse a run if the memory of its update, or of its engine's waking, exceeds the device.

        Raises:
            ConfigError: in one line, which states each addend.
        """
        gib, rollout = config.recipe.gpu_gib, config.actor_rollout_ref.rollout
        for what, taken in ("an update takes", self.update), ("when the engine wakes it takes", self.wake):
            beside = sum(taken.values()) - taken.get("engine", 0.0)
            if sum(taken.values()) <= gib:
                continue
            text = f"{what} {in_words(taken, gib)}"
            if taken is self.update and beside > gib:
                raise fail(
                    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
                    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu,
                    f"fewer tokens, more devices, or actor_rollout_ref.actor.fsdp_config.model_dtype=bf16: {text}",
                )
            most = max(0, math.floor((gib - beside) / gib * 100) / 100)
            offload = "actor_rollout_ref.actor.fsdp_config.optimizer_offload"
            other = f"{offload}=True" if taken is self.wake else "actor_rollout_ref.rollout.free_cache_engine=True"
            remedy = f"at most {most:g}"
            if not OmegaConf.select(config, other.removesuffix("=True")):
                remedy += f", or {other}"
            raise fail(
                "actor_rollout_ref.rollout.gpu_memory_utilization",
                rollout.gpu_memory_utilization,
                f"{remedy}: {text}",
            )


def in_words(taken: dict[str, float], gib: float) -> str:
    """Return the sum and its addends as text: ``63.6 GiB of 80 a device (engine 56.0, weights 1.9, ...)``."""
    addends = ", ".join(f"{name} {each:.1f}" for name, each in taken.items())
    return f"{sum(taken.values()):.1f} GiB of {gib:g} a device ({addends})"
