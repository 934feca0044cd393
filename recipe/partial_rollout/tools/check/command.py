"""Can a run start? This machine; or, with a run's overrides, its settings and inputs, its plan, and what it lacks here.

All that needs no GPU and no Ray. Exit code: 0, 2 if the settings do not hold, 3 if a line says FAIL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.settings import (
    Mode,
    PartialRolloutConfig,
    engine_devices,
    trainer_devices,
    verls_own,
)
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.preflight.facts import replica_devices
from recipe.partial_rollout.preflight.inputs import (
    check_model,
    cpus_for_ray,
    missing_inputs,
    missing_packages,
)
from recipe.partial_rollout.preflight.resumption import check_checkpoints, check_made_of_rows
from recipe.partial_rollout.preflight.rows import (
    check_files,
    check_lengths,
    check_prompts,
    check_rows,
    check_steps,
    dataset_of,
    prompt_lengths,
)
from recipe.partial_rollout.preflight.settings_check import check_settings
from recipe.partial_rollout.preflight.user_code import find_tools
from recipe.partial_rollout.tools.check import machine
from recipe.partial_rollout.tools.check.machine import Finding, missing
from recipe.partial_rollout.tools.check.memory import DeviceMemory, ModelSize, checkpoint_gib, in_words
from recipe.partial_rollout.tools.command_line import Parser, typed

MISSING = 3
"""exit code of a check whose settings hold, and that lacks data, model, packages or machine"""


def main(arguments: list[str] | None = None) -> int:
    """Print a line a finding, of this machine or of a run; the exit code of the module docstring."""
    parser = Parser(
        typed("check"),
        "Say whether a run can start, and what it lacks.",
        ["", "--config-name recipe experiment=gsm8k_8gpu_4b arm=pr"],
        "Without arguments: this machine, in half a minute, with one request to the model hub unless HF_HUB_OFFLINE is "
        "set. With a run's overrides: its settings and inputs, its plan, memory of a device. Exit code: 0, 2 if the "
        "settings do not hold, 3 if a line says FAIL.",
    )
    parser.add_argument("--config-name", metavar="NAME", help="config of the run, of conf/")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="hydra's overrides of the run")
    given = parser.parse_args(arguments)
    if given.config_name or given.overrides:
        from recipe.partial_rollout import main_ppo

        name = [f"--config-name={given.config_name}"] if given.config_name else []
        sys.argv[1:] = [main_ppo.CHECK, *name, *given.overrides]
        main_ppo.main()
        return 0
    # vLLM reads it when it is imported; its log would stand between the lines.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return told(machine.findings())


def told(findings: Iterable[Finding]) -> int:
    """Print them; the exit code."""
    stopped = False
    for finding in findings:
        print(finding, flush=True)
        stopped |= finding.stops
    return MISSING if stopped else 0


def check_run(config: DictConfig) -> Iterator[Finding]:
    """The plan of a run, then what it lacks.

    Args:
        config: resolved; an arm of verl's v1 trainer is checked as noPR, whose settings it shares.

    Raises:
        ConfigError: the settings do not hold, or an input that is there does not fit them.
    """
    settings = check_settings(_as_no_pr(config) if verls_own(config) else config)
    # Its paths are relative where a copy was checked.
    find_tools(config)
    lacking = list(map(missing, missing_inputs(config)))
    prompts = None if lacking else _check_contents(config)
    size = ModelSize.of(config)
    lacking += map(missing, missing_packages(config))
    lacking += machine.lacks(config, size)
    memory = DeviceMemory.of(config, size)
    if memory:
        memory.check(config)
    yield from plan(config, settings, size, memory, prompts)
    yield from lacking


def _as_no_pr(config: DictConfig) -> DictConfig:
    copy: Any = OmegaConf.create(OmegaConf.to_container(config))
    copy.trainer.use_v1 = copy.partial_rollout.enable = False
    # The v1 trainer has no parts of the recipe's that these would replace.
    copy.actor_rollout_ref.rollout.agent.agent_loop_manager_class = None
    copy.actor_rollout_ref.rollout.checkpoint_manager_class = copy.trainer.checkpoint_callback_class = None
    # Its manager deals out prompts, in any number.
    copy.actor_rollout_ref.rollout.agent.num_workers = 1
    return copy


def _check_contents(config: DictConfig) -> str:
    """Check tokenizer, weight sync, prompts and columns; what the plan says of the prompts."""
    from verl.utils.tokenizer import hf_tokenizer

    data, model = config.data, config.actor_rollout_ref.model
    check_files(config)
    check_model(config)
    checkpoints = None if verls_own(config) else check_checkpoints(config)
    tokenizer = hf_tokenizer(model.get("tokenizer_path") or model.path, trust_remote_code=model.trust_remote_code)
    tokenizer.chat_template = model.get("custom_chat_template") or tokenizer.chat_template
    dataset = dataset_of(config, "train", tokenizer, filter_overlong_prompts=False)
    lengths = prompt_lengths(config, tokenizer, dataset)
    check_rows(config, dataset)
    if not data.filter_overlong_prompts:
        check_lengths(config, lengths)
        if checkpoints is not None:
            check_made_of_rows(config, checkpoints, dataset)
    over = int((lengths > data.max_prompt_length).sum())
    held_out = dataset_of(config, "val", tokenizer)
    check_prompts(config, tokenizer, held_out, "data.val_files")
    check_steps(config, len(lengths) - over, len(held_out))
    return (
        f"{len(lengths):,}, median {np.median(lengths):.0f} tokens, longest {lengths.max()}; {over:,} longer than "
        f"{data.max_prompt_length:,} are left out; {(len(lengths) - over) // data.train_batch_size:,} steps an epoch"
    )


# -- the plan ------------------------------------------------------------------------------------------------------------


def plan(
    config: DictConfig,
    settings: PartialRolloutConfig,
    model: ModelSize | None,
    memory: DeviceMemory | None,
    prompts: str | None,
) -> Iterator[Finding]:
    """What the run will be; what is None is not known, and left out."""
    trainer, data = config.trainer, config.data
    yield Finding("run", f"{trainer.project_name}/{trainer.experiment_name}: {_trainer(config, settings)}")
    size = f"{model.parameters / 1e6:,.1f} M parameters" if model else "size not known: no config.json of a model"
    yield Finding("model", f"{config.actor_rollout_ref.model.path}: {size}")
    replicas = max(1, (engine_devices(config) or trainer_devices(config)) // replica_devices(config))
    yield Finding("devices", f"{_devices(config, replicas)}; {cpus_for_ray(config)} CPUs for Ray")
    sizes = f"prompts up to {data.max_prompt_length:,} tokens, responses up to {data.max_response_length:,}"
    yield Finding("batch", f"{settings.batch_groups} prompts x {settings.samples_per_group} samples; {sizes}")
    if prompts:
        yield Finding("prompts", prompts)
    samples = _in_flight(config, settings)
    yield Finding("in flight", f"up to {samples:,} samples, {-(-samples // replicas):,} a replica")
    for name, taken in (("update", memory.update), ("wake", memory.wake)) if memory else ():
        if taken:
            yield Finding(name, in_words(taken, config.recipe.gpu_gib))
    yield Finding("reads", f"{data.train_files}, {data.val_files}")
    saved = "no checkpoints"
    if trainer.save_freq > 0:
        size = f" of {checkpoint_gib(config, model):.1f} GiB" if model else ""
        at_once = machine.checkpoints_at_once(config)
        saved = f"a checkpoint every {trainer.save_freq} steps{size}, {at_once} at once"
    logger = OmegaConf.to_container(trainer.logger) if OmegaConf.is_list(trainer.logger) else trainer.logger
    yield Finding("writes", f"{trainer.default_local_dir}: config, metrics, trace, {saved}; logger {logger}")


def _trainer(config: DictConfig, settings: PartialRolloutConfig) -> str:
    algorithm = f"{config.algorithm.adv_estimator}, {config.actor_rollout_ref.actor.strategy}"
    if verls_own(config):
        return f"verl's own v1 trainer, {config.trainer.v1.trainer_mode}; {algorithm}"
    if config.trainer.use_v1:
        algorithm += ", under verl's v1"
    if not settings.enable:
        return f"noPR, verl's synchronous rollout; {algorithm}"
    how = "separate" if settings.separate else f"mode {settings.mode}"
    return f"PR, {how}, overlap {settings.overlap:g}, max_staleness {settings.max_staleness}; {algorithm}"


def _devices(config: DictConfig, replicas: int) -> str:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    theirs = f"{trainer.nnodes} x {trainer.n_gpus_per_node} {trainer.device}"
    if not engine_devices(config):
        return f"{theirs}; {replicas} engine replicas"
    engines = f"{rollout.nnodes} x {rollout.n_gpus_per_node} for {replicas} engine replicas"
    return f"{theirs} for the trainer, {engines}; weights by {rollout.checkpoint_engine.backend}"


def _in_flight(config: DictConfig, settings: PartialRolloutConfig) -> int:
    """Samples at once, at most."""
    samples = settings.batch_samples
    if settings.enable and settings.mode is not Mode.SSIM:
        return max(samples, Admission(settings).most_per_version() * settings.samples_per_group)
    if config.trainer.use_v1 and config.trainer.v1.trainer_mode == "colocate_async":
        samples += int(samples * config.trainer.v1.colocate_async.num_warmup_batches)
    return samples
