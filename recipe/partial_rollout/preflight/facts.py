"""What rules ask of a configuration, and of verl, vLLM and the machine about it."""

from __future__ import annotations

import inspect
from math import lcm, prod
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.trainer.ppo.utils import need_reference_policy
from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, RolloutReplica

from recipe.partial_rollout.config.settings import OVERLONG, trainer_devices
from recipe.partial_rollout.training.loss import WeightLevel, weight_level

_LOSS, _CORRECTION = "actor.policy_loss.loss_mode", "algorithm.rollout_correction"


def full(key: str) -> str:
    """``key`` as verl has it; a part of ``actor_rollout_ref`` may be written without that, such as ``rollout.n``."""
    return f"actor_rollout_ref.{key}" if key.partition(".")[0] in ("actor", "model", "ref", "rollout") else key


def at(config: DictConfig, key: str) -> Any:
    """The value of ``key``; None if it is not there."""
    return OmegaConf.select(config, full(key))


# -- sizes -------------------------------------------------------------------------------------------------------------


def replica_devices(config: DictConfig) -> int:
    """Devices of an engine replica."""
    rollout = config.actor_rollout_ref.rollout
    return prod((rollout.tensor_model_parallel_size, rollout.data_parallel_size, rollout.pipeline_model_parallel_size))


def longest(config: DictConfig) -> int:
    """Tokens of the longest sample."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.prompt_length + rollout.response_length


def split(config: DictConfig, engine: str) -> tuple[int, int]:
    """Devices that share the model of ``engine`` (actor, ref or critic), and those of them that share a sequence."""
    node = at(config, engine)
    if node.strategy == "megatron":
        megatron = node.megatron
        context = megatron.context_parallel_size
        return megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * context, context
    inner = node.get("fsdp_config") or node.get("fsdp") or {}
    sequence = max(node.get("ulysses_sequence_parallel_size") or 1, inner.get("ulysses_sequence_parallel_size") or 1)
    return sequence, sequence


def copies(config: DictConfig, engine: str) -> int:
    """Parts that ``engine`` divides a batch into."""
    return max(1, trainer_devices(config) // split(config, engine)[0])


def parts(config: DictConfig) -> int:
    """Parts that a batch must divide into, for the actor and for a reference."""
    engines = ("actor", "ref") if need_reference_policy(config) else ("actor",)
    return lcm(*(copies(config, engine) for engine in engines))


def dealt_out(config: DictConfig) -> int:
    """Samples of a step of noPR; for ReMax with a greedy one for each prompt."""
    per_prompt = at(config, "rollout.n") + (at(config, "algorithm.adv_estimator") == "remax")
    return at(config, "data.train_batch_size") * per_prompt


def makes_whole_replicas(devices: int, config: DictConfig) -> bool:
    size = replica_devices(config)
    whole = max(size, devices) % min(size, devices) == 0
    return whole and config.actor_rollout_ref.rollout.nnodes * devices % size == 0


def most_calls(config: DictConfig) -> int:
    """Samples that verl's server takes at once, beside calls that control it."""
    server: Any = RolloutReplica.max_concurrency
    return server.fget(SimpleNamespace(config=config.actor_rollout_ref.rollout)) - CONTROL_METHOD_CONCURRENCY


# -- rewards, engines and estimators ----------------------------------------------------------------------------


def penalises_length(config: DictConfig) -> bool:
    return config.reward.reward_manager.name == "dapo" and bool(at(config, f"{OVERLONG}.enable"))


def keeps_kv(config: DictConfig) -> bool:
    """Whether an engine has the keys and values of before, once a round resumes."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.enable_prefix_caching and not rollout.free_cache_engine


def trains_adapters(config: DictConfig) -> bool:
    return max(at(config, "model.lora_rank") or 0, at(config, "model.lora.rank") or 0) > 0


def scores_early(config: DictConfig) -> bool:
    """Whether rewards come while engines decode: a colocated reward model scores once they sleep."""
    model = config.reward.reward_model
    return not model.enable or model.enable_resource_pool


def compares_siblings(config: DictConfig) -> bool:
    """Whether the advantage estimator, of verl's, is told which samples are a prompt's, whose baseline the others make."""
    estimator: Any = ADV_ESTIMATOR_REGISTRY.get(config.algorithm.adv_estimator)
    if estimator is None or not estimator.__module__.startswith("verl."):
        return False
    return "index" in inspect.signature(estimator).parameters


# -- the loss ----------------------------------------------------------------------------------------------------------


def fitting_level(config: DictConfig) -> WeightLevel:
    return weight_level(at(config, _LOSS))


def levels(config: DictConfig) -> list[WeightLevel]:
    """Those that fit the loss."""
    token = fitting_level(config) is WeightLevel.TOKEN
    return [level for level in WeightLevel if token or level is not WeightLevel.TOKEN]


def keeps_on_policy_tokens(threshold: Any, config: DictConfig) -> bool:
    """Whether a token of weight 1 keeps it; raises what verl raises for a threshold that it does not take."""
    level = at(config, f"{_CORRECTION}.rollout_is") or fitting_level(config)
    on_policy, mask = torch.zeros(1, 1), torch.ones(1, 1)
    weights, _ = compute_rollout_correction_weights(on_policy, mask, level, rollout_is_threshold=threshold)
    return bool(weights.any())
