"""``main_ppo --check``: every check that needs no GPU and no Ray, then the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.choices import Mode, Placement
from recipe.partial_rollout.config.settings import PartialRolloutConfig, engine_devices, trainer_devices
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.preflight.inputs import (
    check_critic,
    check_prompts,
    check_rows,
    check_vocabulary,
    find_tools,
    missing_inputs,
    missing_packages,
    prompt_lengths,
    size_bucket,
)
from recipe.partial_rollout.preflight.placement_check import cpus_for_ray
from recipe.partial_rollout.preflight.resumption import check_checkpoints, check_made_of_rows
from recipe.partial_rollout.preflight.rows import check_files, check_steps
from recipe.partial_rollout.preflight.settings_check import check_settings
from recipe.partial_rollout.preflight.user_code import check_code
from recipe.partial_rollout.tools.host import checkpoint_gib, checkpoints_at_once, machine_problems
from recipe.partial_rollout.tools.lengths import lognormal
from recipe.partial_rollout.tools.memory import DeviceMemory, ModelShape, check_memory, shape_of
from recipe.partial_rollout.tools.planner.engine_curve import PRESETS, Cluster
from recipe.partial_rollout.tools.planner.rounds import baseline, forecast

_CURVE = "h100-qwen3-4b"
_MEDIAN, _MEAN = 1 / 6, 1 / 5
"""of assumed response lengths, as shares of the cap"""
_ROUNDS = 12
_MOST_FORECAST = 4096
"""samples in flight that a forecast of seconds can play"""

INPUTS_MISSING = 3
"""exit code of a check whose settings hold, and whose data, model, packages or machine are not there"""


def dry_run(config: DictConfig) -> int:
    """Print the plan, then a line for each missing input; returns 0, or ``INPUTS_MISSING``.

    Args:
        config: resolved; an arm of verl's v1 trainer is checked as noPR, whose settings it shares.

    Raises:
        ConfigError: the settings do not hold, or an input that is there does not fit them.
    """
    settings = check_settings(_as_no_pr(config) if config.trainer.use_v1 else config)
    find_tools(config)
    check_code(config)
    missing = list(missing_inputs(config))
    prompts = None if missing else _check_contents(config)
    shape = shape_of(config)
    missing += [*missing_packages(config), *machine_problems(config, shape.parameters if shape else None)]
    memory = DeviceMemory.of(config, shape) if shape else None
    check_memory(config, memory)
    sizes = Sizes.of(config, settings, memory.kv_tokens if memory else None)
    expected = _expected(config, settings, sizes, memory) if settings.enable else None
    for line in lines(config, settings, sizes, shape, memory, prompts=prompts, expected=expected):
        print(line)
    for error in missing:
        print(f"missing: {error}")
    if not missing:
        print("check passed: nothing is missing")
    return INPUTS_MISSING if missing else 0


def _as_no_pr(config: DictConfig) -> DictConfig:
    copy: Any = OmegaConf.create(OmegaConf.to_container(config))
    copy.trainer.use_v1 = copy.partial_rollout.enable = False
    # The v1 trainer has no parts of the recipe's that these would replace.
    copy.actor_rollout_ref.rollout.agent.agent_loop_manager_class = None
    copy.actor_rollout_ref.rollout.checkpoint_manager_class = copy.trainer.checkpoint_callback_class = None
    return copy


def _check_contents(config: DictConfig) -> str:
    """Check tokenizer, weight sync, prompts and columns; what the plan says of them."""
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.utils.tokenizer import hf_tokenizer

    check_files(config)
    check_vocabulary(config)
    check_critic(config)
    size_bucket(config)
    if not config.trainer.use_v1:
        check_checkpoints(config)
    model = config.actor_rollout_ref.model
    tokenizer = hf_tokenizer(model.get("tokenizer_path") or model.path, trust_remote_code=model.trust_remote_code)
    unfiltered: Any = OmegaConf.merge(config, {"data": {"filter_overlong_prompts": False}})
    dataset: Any = create_rl_dataset(
        config.data.train_files,
        unfiltered.data,
        tokenizer,
        None,
        is_train=True,
        max_samples=config.data.get("train_max_samples", -1),
    )
    check_prompts(config, tokenizer, dataset)
    check_rows(config, dataset)
    if not (config.trainer.use_v1 or config.data.filter_overlong_prompts):
        check_made_of_rows(config, dataset)
    lengths, limit = prompt_lengths(unfiltered, tokenizer, dataset), config.data.max_prompt_length
    over = int((lengths > limit).sum())
    held_out: Any = create_rl_dataset(config.data.val_files, config.data, tokenizer, None, is_train=False)
    check_steps(config, len(lengths) - over, len(held_out))
    median, longest = np.quantile(lengths, (0.5, 1.0))
    steps = (len(lengths) - over) // config.data.train_batch_size
    return (
        f"{len(lengths):,}, median {median:.0f} tokens, longest {longest:.0f}; {over:,} longer than {limit:,} are left "
        f"out; {steps:,} steps an epoch"
    )


def _expected(config: DictConfig, settings: PartialRolloutConfig, sizes: Sizes, memory: DeviceMemory | None) -> str:
    """What the planner's simulation says, for assumed lengths and an assumed engine."""
    if settings.placement is Placement.SEPARATE:
        return "not forecast: the split of the devices decides"
    if config.trainer.device == "cpu":
        return "not forecast: no curve of a CPU is known; partial-rollout tools plan --run DIR has that of a noPR run"
    if sizes.in_flight > _MOST_FORECAST:
        return "not forecast: too many samples for a check of seconds; python -m recipe.partial_rollout.tools plan"
    cap, n = config.data.max_response_length, settings.samples_per_group
    lengths = lognormal(median=cap * _MEDIAN, mean=cap * _MEAN, cap=cap, samples_per_group=n)
    curve = replace(PRESETS[_CURVE], kv_tokens=memory.kv_tokens if memory else None)
    cluster = Cluster(curve, sizes.replicas, sizes.seats, keeps_kv=str(settings.resume_kv) == "keep")
    found = forecast(settings, cluster, lengths, rounds=_ROUNDS)
    base = forecast(baseline(settings), cluster, lengths, rounds=_ROUNDS)
    return (
        f"staleness mean {found.staleness_mean:.2f}, p95 {found.staleness_p95:.0f}, max {found.staleness_max}; rollout "
        f"{base.trained_tokens_per_s / found.trained_tokens_per_s:.2f} of noPR's time (assumed, not measured: lognormal "
        f"lengths, median {cap * _MEDIAN:,.0f}, mean {cap * _MEAN:,.0f}; engine {_CURVE})"
    )


# -- the plan, in lines ------------------------------------------------------------------------------------------------


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
        groups = settings.batch_groups
        in_flight = groups * settings.samples_per_group
        if settings.enable:
            in_flight = max(in_flight, _in_flight(settings))
        elif config.trainer.use_v1 and config.trainer.v1.trainer_mode == "colocate_async":
            in_flight += int(in_flight * config.trainer.v1.colocate_async.num_warmup_batches)
        seats = settings.slots_per_replica if settings.enable else rollout.max_num_seqs
        if kv_tokens is not None:
            seats = min(seats, max(1, kv_tokens // (rollout.prompt_length + -(-rollout.response_length // 2))))
        return cls(max(1, devices // prod(parallel)), in_flight, seats)


def _in_flight(settings: PartialRolloutConfig) -> int:
    if settings.mode is Mode.SSIM:
        return settings.batch_samples
    return Admission(settings).most_per_version() * settings.samples_per_group


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
    size = (
        f" of {checkpoint_gib(config, shape.parameters):.1f} GiB, {checkpoints_at_once(config)} at once"
        if shape
        else ""
    )
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
    how = "separate" if settings.placement is Placement.SEPARATE else f"mode {settings.mode}"
    return f"PR, {how}, overlap {settings.overlap:g}, max_staleness {settings.max_staleness}; {algorithm}"


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
