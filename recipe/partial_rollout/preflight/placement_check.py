"""Checks of ``partial_rollout.placement=separate``: devices of each side, how weights travel, what needs shared devices."""

from __future__ import annotations

import sys
from math import prod

from omegaconf import DictConfig
from verl.trainer.ppo.utils import need_critic

from recipe.partial_rollout.config.choices import Placement
from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.config.settings import PartialRolloutConfig, engine_devices, trainer_devices
from recipe.partial_rollout.engine.hold import has_pause_modes
from verl_ext.guard import installed_pair

CPUS_PER_TRAINER, CPUS_PER_ENGINE = 3, 2
"""that verl's placement groups reserve with each device; the second, where engines have devices of their own"""
_ROLLOUT = "actor_rollout_ref.rollout"
_BACKEND = f"{_ROLLOUT}.checkpoint_engine.backend"
_WITH = "with partial_rollout.placement=separate"


def check_placement(config: DictConfig, settings: PartialRolloutConfig) -> None:
    """Refuse what does not go with where the engines run.

    Raises:
        ConfigError: in one line.
    """
    rollout = config.actor_rollout_ref.rollout
    backend = rollout.checkpoint_engine.backend
    if settings.placement is not Placement.SEPARATE:
        if backend != "naive":
            raise fail(
                _BACKEND,
                backend,
                "with partial_rollout.enable=True it must be naive: trainer and engines share their devices",
            )
        return
    _check_engine()
    _check_sharing(config)
    warmup = config.trainer.critic_warmup
    if warmup and not need_critic(config):
        # Its steps would begin a version without an update of anything, and so without an end of their batch.
        raise fail("trainer.critic_warmup", warmup, f"0 {_WITH} and no critic")
    _check_devices(config)
    _check_transfer(config)
    if settings.overlap < 1:
        print(
            f"warning: partial_rollout.overlap={settings.overlap:g} {_WITH}: fewer than N groups are in flight while the "
            "trainer holds N, so it waits for them; at least 1 keeps both sides busy",
            file=sys.stderr,
        )


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


def _check_engine() -> None:
    if not has_pause_modes():
        raise fail(
            "partial_rollout.placement",
            Placement.SEPARATE,
            f"colocated with vLLM {installed_pair().vllm}, which has no pause modes to hold an engine with; the pinned set "
            "has them (bash run_scripts/setup.sh)",
        )


def _check_sharing(config: DictConfig) -> None:
    """Refuse what only works where trainer and engines take turns on the same devices."""
    if config.actor_rollout_ref.rollout.free_cache_engine:
        raise fail(f"{_ROLLOUT}.free_cache_engine", True, f"False {_WITH}: the engines never sleep")
    model = config.reward.reward_model
    if model.enable and not model.enable_resource_pool:
        raise fail(
            "reward.reward_model.enable_resource_pool",
            False,
            f"True {_WITH}: a colocated reward model scores when the engines sleep, and they never do",
        )
    lora = config.actor_rollout_ref.model.get("lora") or {}
    rank = max(config.actor_rollout_ref.model.get("lora_rank") or 0, lora.get("rank") or 0)
    if rank > 0 and not lora.get("merge"):
        raise fail(
            "actor_rollout_ref.model.lora.merge",
            lora.get("merge"),
            f"True {_WITH} and a LoRA rank of {rank}: whole weights are transferred, no adapters",
        )


def _check_devices(config: DictConfig) -> None:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    nodes, per_node = rollout.nnodes, rollout.n_gpus_per_node
    for name, value in (("nnodes", nodes), ("n_gpus_per_node", per_node)):
        if value < 1:
            raise fail(f"{_ROLLOUT}.{name}", value, f"an integer of at least 1 {_WITH}: the engines' devices")
    size = prod((rollout.tensor_model_parallel_size, rollout.data_parallel_size, rollout.pipeline_model_parallel_size))
    if max(size, per_node) % min(size, per_node) or nodes * per_node % size:
        raise fail(
            f"{_ROLLOUT}.n_gpus_per_node",
            per_node,
            f"with rollout.nnodes={nodes} it must make whole replicas of {size} devices each",
        )
    if trainer_devices(config) % size:
        raise fail(
            "trainer.n_gpus_per_node",
            trainer.n_gpus_per_node,
            f"times trainer.nnodes={trainer.nnodes} it must be divisible by a replica's {size} devices: "
            "verl's workers assert it",
        )


def _check_transfer(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    backend = rollout.checkpoint_engine.backend
    if backend == "naive":
        raise fail(_BACKEND, backend, f"shm (one node) or nccl (GPUs) {_WITH}: naive needs shared devices")
    if backend != "shm":
        return
    for key, nodes in (("trainer.nnodes", config.trainer.nnodes), (f"{_ROLLOUT}.nnodes", rollout.nnodes)):
        if nodes > 1:
            raise fail(key, nodes, f"1 with {_BACKEND}=shm, whose file other nodes do not see; nccl crosses nodes")


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
