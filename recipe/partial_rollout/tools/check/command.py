"""Check whether a run can start: ``check`` this machine; a run's ``--check`` all that it checks before Ray starts.

Exit code: 0, 2 if a setting does not hold, 3 if only data, model, packages or the machine lack something.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout import preflight
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.config.settings import (
    Mode,
    PartialRolloutConfig,
    engine_devices,
    trainer_devices,
    verls_own,
)
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.preflight import Checked, Kind
from recipe.partial_rollout.preflight.inputs import cpus_for_ray
from recipe.partial_rollout.preflight.rows import dataset_of
from recipe.partial_rollout.preflight.rule import replica_devices
from recipe.partial_rollout.tools.check import machine
from recipe.partial_rollout.tools.check.machine import Finding
from recipe.partial_rollout.tools.check.memory import DeviceMemory, ModelSize, checkpoint_gib, in_words
from recipe.partial_rollout.tools.command_line import Parser, typed

WRONG, MISSING = 2, 3
"""exit codes of a check: a setting does not hold; all hold, and data, model, packages or the machine lack something"""


def main(arguments: list[str] | None = None) -> int:
    """Print a line a finding of this machine; the exit code of the module docstring."""
    Parser(
        typed("check"),
        "Say what this machine lacks for a run.",
        [""],
        "It takes half a minute. Exit code: 0, or 3 if no run can start. For a run's settings and inputs, its plan, and "
        "memory of a device: its command with --check.",
    ).parse_args(arguments)
    # vLLM reads it when it is imported; its log would stand between the lines.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return told(machine.findings())


def told(findings: Iterable[Finding]) -> int:
    """Print the findings; return the exit code."""
    stopped = False
    for finding in findings:
        print(finding, flush=True)
        stopped |= finding.stops
    return MISSING if stopped else 0


def check_run(config: DictConfig) -> int:
    """Print what a start would refuse, then the plan of the run; return the exit code.

    Raises:
        ConfigError: the keys cannot be read.
    """
    refused: set[Kind] = set()

    def refuse(kind: Kind, error: ConfigError) -> None:
        refused.add(kind)
        print(Finding(kind, str(error), stops=True), flush=True)

    checked = preflight.checked(config, refuse)
    size = ModelSize.of(config)
    memory = DeviceMemory.of(config, size)
    try:
        if memory:
            memory.check(config)
    except ConfigError as error:
        refuse("setting", error)
    code = told((*plan(config, checked, size, memory), *machine.lacks(config, size)))
    return WRONG if "setting" in refused else MISSING if refused else code


def _prompts(config: DictConfig, checked: Checked, count: int) -> str:
    """Describe the ``count`` prompts of the training, and those that verl leaves out."""
    data = config.data
    everything = dataset_of(config, "train", checked.tokenizer, checked.processor, filter_overlong_prompts=False)
    return (
        f"{count:,}; {len(everything) - count:,} of more than {data.max_prompt_length:,} tokens are left out; "
        f"{count // data.train_batch_size:,} steps an epoch"
    )


# -- the plan ------------------------------------------------------------------------------------------------------------


def plan(
    config: DictConfig, checked: Checked, model: ModelSize | None, memory: DeviceMemory | None
) -> Iterator[Finding]:
    """Describe the run that the config makes; what is not known is left out."""
    trainer, data, settings = config.trainer, config.data, checked.settings
    yield Finding("run", f"{trainer.project_name}/{trainer.experiment_name}: {_trainer(config, settings)}")
    size = f"{model.parameters / 1e6:,.1f} M parameters" if model else "size not known: no config.json of a model"
    yield Finding("model", f"{config.actor_rollout_ref.model.path}: {size}")
    replicas = max(1, (engine_devices(config) or trainer_devices(config)) // replica_devices(config))
    yield Finding("devices", f"{_devices(config, replicas)}; {cpus_for_ray(config)} CPUs for Ray")
    sizes = f"prompts up to {data.max_prompt_length:,} tokens, responses up to {data.max_response_length:,}"
    yield Finding("batch", f"{settings.batch_groups} prompts x {settings.samples_per_group} samples; {sizes}")
    if checked.datasets:
        yield Finding("prompts", _prompts(config, checked, len(checked.datasets[0])))
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
