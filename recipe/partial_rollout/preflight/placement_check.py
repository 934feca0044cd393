"""Where the engines run: what ``partial_rollout.placement`` needs of verl's keys, and what a run needs of Ray."""

from __future__ import annotations

import sys

from omegaconf import DictConfig
from verl.trainer.ppo.utils import need_critic

from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.config.settings import PartialRolloutConfig, engine_devices, trainer_devices
from recipe.partial_rollout.preflight.rule import ROLLOUT, Rule, at, check_rules, least
from recipe.partial_rollout.preflight.rules import replica_devices, scores_early
from verl_ext.guard import TESTED, installed_pair

CPUS_PER_TRAINER, CPUS_PER_ENGINE = 3, 2
"""that verl's placement groups reserve with each device; the second, where engines have devices of their own"""
_BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
_WITH = "with partial_rollout.placement=separate"


def _lora_rank(config: DictConfig) -> int:
    model = config.actor_rollout_ref.model
    return max(model.get("lora_rank") or 0, at(config, "actor_rollout_ref.model.lora.rank") or 0)


def _makes_whole_replicas(config: DictConfig) -> bool:
    rollout, size = config.actor_rollout_ref.rollout, replica_devices(config)
    each = rollout.n_gpus_per_node
    return max(size, each) % min(size, each) == 0 and rollout.nnodes * each % size == 0


_COLOCATED = (
    Rule(
        _BACKEND,
        lambda backend, _: backend == "naive",
        "with partial_rollout.enable=True it must be naive: trainer and engines share their devices",
    ),
)
_SEPARATE = (
    Rule(
        "partial_rollout.placement",
        lambda *_: installed_pair().vllm in [pair.vllm for pair in TESTED],
        lambda _: (
            f"colocated with vLLM {installed_pair().vllm}: only the pinned set's engines have been held "
            "(bash run_scripts/setup.sh)"
        ),
    ),
    Rule(f"{ROLLOUT}.free_cache_engine", lambda on, _: not on, f"False {_WITH}: the engines never sleep"),
    Rule(
        "reward.reward_model.enable_resource_pool",
        lambda _, c: scores_early(c),
        f"True {_WITH}: a colocated reward model scores when the engines sleep, and they never do",
    ),
    Rule(
        "actor_rollout_ref.model.lora.merge",
        lambda merge, c: merge or not _lora_rank(c),
        lambda c: f"True {_WITH} and a LoRA rank of {_lora_rank(c)}: whole weights are transferred, no adapters",
    ),
    # Its steps would begin a version without an update of anything, and so without an end of their batch.
    Rule("trainer.critic_warmup", lambda steps, c: not steps or need_critic(c), f"0 {_WITH} and no critic"),
    least(f"{ROLLOUT}.nnodes", 1, why=f" {_WITH}: the engines' devices"),
    least(f"{ROLLOUT}.n_gpus_per_node", 1, why=f" {_WITH}: the engines' devices"),
    Rule(
        f"{ROLLOUT}.n_gpus_per_node",
        lambda _, c: _makes_whole_replicas(c),
        lambda c: (
            f"with rollout.nnodes={c.actor_rollout_ref.rollout.nnodes} it must make whole replicas of {replica_devices(c)} "
            "devices each"
        ),
    ),
    Rule(
        "trainer.n_gpus_per_node",
        lambda _, c: trainer_devices(c) % replica_devices(c) == 0,
        lambda c: (
            f"times trainer.nnodes={c.trainer.nnodes} it must be divisible by a replica's {replica_devices(c)} devices: "
            "verl's workers assert it"
        ),
    ),
    Rule(
        _BACKEND,
        lambda backend, _: backend != "naive",
        f"shm (one node) or nccl (GPUs) {_WITH}: naive needs shared devices",
    ),
    *(
        Rule(
            key,
            lambda nodes, c: nodes == 1 or at(c, _BACKEND) != "shm",
            f"1 with {_BACKEND}=shm, whose file other nodes do not see; nccl crosses nodes",
        )
        for key in ("trainer.nnodes", f"{ROLLOUT}.nnodes")
    ),
)


def check_placement(config: DictConfig, settings: PartialRolloutConfig) -> None:
    """Refuse what does not go with where the engines run.

    Raises:
        ConfigError: in one line.
    """
    check_rules(_SEPARATE if settings.separate else _COLOCATED, config)
    if settings.separate and settings.overlap < 1:
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
            f"{ROLLOUT}.n_gpus_per_node",
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
