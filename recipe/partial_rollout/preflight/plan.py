"""The plan of a run, in lines: batch, samples in flight, memory, expected staleness, and where files go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.choices import Mode, Placement
from recipe.partial_rollout.config.settings import PartialRolloutConfig, engine_devices, trainer_devices
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.preflight.machine import checkpoint_gib, checkpoints_at_once, cpus_for_ray
from recipe.partial_rollout.preflight.memory import DeviceMemory
from recipe.partial_rollout.preflight.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Sizes:
    """Replicas and samples of a run."""

    replicas: int
    in_flight: int
    """samples, at most"""
    seats: int
    """samples that a replica runs at once in the first round; later rounds go by the lengths measured"""

    @classmethod
    def of(cls, config: DictConfig, settings: PartialRolloutConfig, kv_tokens: int | None) -> Sizes:
        rollout = config.actor_rollout_ref.rollout
        devices = engine_devices(config) or trainer_devices(config)
        parallel = (
            rollout.tensor_model_parallel_size,
            rollout.data_parallel_size,
            rollout.pipeline_model_parallel_size,
        )
        admission = Admission.of(settings)
        groups = settings.batch_groups
        in_flight = groups * settings.samples_per_group
        if settings.enable:
            in_flight = max(in_flight, _in_flight(settings, admission))
        elif config.trainer.use_v1 and config.trainer.v1.trainer_mode == "colocate_async":
            in_flight += int(in_flight * config.trainer.v1.colocate_async.num_warmup_batches)
        seats = settings.slots_per_replica if settings.enable else rollout.max_num_seqs
        if kv_tokens is not None:
            seats = min(seats, max(1, kv_tokens // (rollout.prompt_length + -(-rollout.response_length // 2))))
        return cls(max(1, devices // prod(parallel)), in_flight, seats)


def _in_flight(settings: PartialRolloutConfig, admission: Admission) -> int:
    if settings.mode is Mode.SSIM:
        return settings.in_flight_samples
    return admission.most_per_round() * settings.samples_per_group


def lines(
    config: DictConfig,
    settings: PartialRolloutConfig,
    sizes: Sizes,
    shape: ModelShape | None,
    memory: DeviceMemory | None,
    *,
    prompts: str | None,
    expected: str | None,
) -> Iterator[str]:
    """The plan; what is None is not known, and left out.

    Args:
        prompts: what is known of their lengths.
        expected: staleness and speed.
    """
    trainer, data = config.trainer, config.data
    n = settings.samples_per_group
    yield f"plan of {trainer.project_name}/{trainer.experiment_name}"
    yield _line("trainer", _trainer(config, settings))
    size = f"{shape.parameters / 1e6:,.1f} M parameters" if shape else "size not known: no config.json of a dense model"
    yield _line("model", f"{config.actor_rollout_ref.model.path}: {size}")
    yield _line("devices", f"{_devices(config, sizes.replicas)}; {cpus_for_ray(config)} CPUs for Ray")
    yield _line("batch", f"{settings.batch_groups} prompts x {n} samples; prompts up to {data.max_prompt_length:,} tokens, "
                f"responses up to {data.max_response_length:,}")  # fmt: skip
    if prompts:
        yield _line("prompts", prompts)
    each = -(-sizes.in_flight // sizes.replicas)
    yield _line(
        "in flight",
        f"up to {sizes.in_flight:,} samples, {each:,} a replica, {min(each, sizes.seats):,} of them at once at first",
    )
    if memory:
        yield from _memory(config, memory)
    if expected:
        yield _line("expected", expected)
    yield _line("reads", f"{data.train_files}, {data.val_files}")
    out = Path(str(trainer.default_local_dir))
    logger = OmegaConf.to_container(trainer.logger) if OmegaConf.is_list(trainer.logger) else trainer.logger
    saved = _checkpoints(config, shape) if trainer.save_freq > 0 else "no checkpoints"
    yield _line("writes", f"{out}: config, metrics, trace, {saved}; logger {logger}")
    if OmegaConf.select(config, "recipe.data_sets"):
        yield _line("report", f"python -m recipe.partial_rollout.tools report {out.parent}/nopr {out.parent}/pr")


def _line(name: str, text: str) -> str:
    return f"  {name:<10}{text}"


def _checkpoints(config: DictConfig, shape: ModelShape | None) -> str:
    size = f" of {checkpoint_gib(config, shape):.1f} GiB, {checkpoints_at_once(config)} at once" if shape else ""
    return f"a checkpoint every {config.trainer.save_freq} steps{size}"


def _devices(config: DictConfig, replicas: int) -> str:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    theirs = f"{trainer.nnodes} x {trainer.n_gpus_per_node} {trainer.device}"
    if not engine_devices(config):
        return f"{theirs}; {replicas} engine replicas"
    engines = f"{rollout.nnodes} x {rollout.n_gpus_per_node} for {replicas} engine replicas"
    return f"{theirs} for the trainer, {engines}; weights by {rollout.checkpoint_engine.backend}"


def _trainer(config: DictConfig, settings: PartialRolloutConfig) -> str:
    algorithm = f"{config.algorithm.adv_estimator}, {config.actor_rollout_ref.actor.strategy}"
    if config.trainer.use_v1:
        return f"verl's own v1 trainer, {config.trainer.v1.trainer_mode}; {algorithm}"
    if not settings.enable:
        return f"noPR, verl's synchronous rollout; {algorithm}"
    overlap = "auto" if settings.adapts_overlap else f"{settings.overlap:g}"
    how = "separate" if settings.placement is Placement.SEPARATE else f"mode {settings.mode}"
    return f"PR, {how}, overlap {overlap}, max_staleness {settings.max_staleness}; {algorithm}"


def _memory(config: DictConfig, memory: DeviceMemory) -> Iterator[str]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if str(actor.strategy).startswith("fsdp"):
        offloaded = [name for name in ("param", "optimizer") if actor.fsdp_config[f"{name}_offload"]]
        where = f" ({' and '.join(offloaded)} offloaded between updates)" if offloaded else ""
        yield _line(
            "trainer",
            f"per device {memory.trainer:.1f} GiB at an update{where}: weights {memory.weights:.1f}, gradients "
            f"{memory.weights:.1f}, Adam {2 * memory.weights:.1f}; logits of {actor.ppo_max_token_len_per_gpu:,} tokens "
            f"{memory.logits:.1f} GiB with their gradient",
        )
    if memory.engine is None or memory.kv_tokens is None:
        yield _line("engine", f"per device weights {memory.engine_weights:.2g} GiB")
        return
    full = memory.kv_tokens / (rollout.prompt_length + rollout.response_length)
    yield _line(
        "engine",
        f"per device {memory.engine:.0f} GiB (gpu_memory_utilization={rollout.gpu_memory_utilization:g} of "
        f"recipe.gpu_gib={config.recipe.gpu_gib:g}): weights {memory.engine_weights:.1f}, the rest at most "
        f"{memory.kv_tokens:,} tokens of KV a replica, {full:,.0f} samples of full length",
    )
