"""Check whether a run can start.

The tool ``check`` looks at this machine alone. ``--check``, given to a run's own command, makes all checks that the run
makes before Ray starts, and prints the plan of the run.

Exit code: 0 if it can start; 2 if a setting is refused; 3 if the settings are right, and data, model, packages or the
machine lack something.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig

from recipe.partial_rollout import preflight
from recipe.partial_rollout.checkpoint.row_images import MESSAGES, has_images
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.config.settings import PartialRolloutConfig, engine_devices, trainer_devices, verls_own
from recipe.partial_rollout.preflight import Checked, Kind
from recipe.partial_rollout.preflight.inputs import cpus_for_ray
from recipe.partial_rollout.preflight.rows import MOST_TRIED, dataset_of, file_rows, processed, rendering_of
from recipe.partial_rollout.preflight.rule import replica_devices
from recipe.partial_rollout.terminal import say
from recipe.partial_rollout.tools.check import machine
from recipe.partial_rollout.tools.check.machine import Finding
from recipe.partial_rollout.tools.check.memory import DeviceMemory, ModelSize, checkpoint_gib, in_words
from recipe.partial_rollout.tools.command_line import Parser, typed

WRONG, MISSING = 2, 3
"""exit codes of a check: a setting does not hold; all hold, and data, model, packages or the machine lack something"""


def main(arguments: list[str] | None = None) -> int:
    """Print the findings about this machine, one a line; return 0, or 3 if no run can start."""
    Parser(
        typed("check"),
        "Say what this machine lacks for a run.",
        [""],
        "It takes half a minute. Exit code: 0, or 3 if no run can start. For a run's settings and inputs, its plan, and "
        "memory of a device: its command with --check.",
    ).parse_args(arguments)
    # vLLM reads the variable at its import; its log lines would stand between those of the findings.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return print_all(machine.findings())


def print_all(findings: Iterable[Finding]) -> int:
    """Print the findings; return the exit code."""
    stopped = False
    for finding in findings:
        say(finding)
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
        say(Finding(kind, str(error), stops=True))

    checked = preflight.checked(config, refuse)
    size = ModelSize.of(config)
    memory = DeviceMemory.of(config, size)
    try:
        if memory:
            memory.check(config)
    except ConfigError as error:
        refuse("setting", error)
    code = print_all((*plan(config, checked, size, memory), *machine.lacks(config, size)))
    return WRONG if "setting" in refused else MISSING if refused else code


# -- the plan ------------------------------------------------------------------------------------------------------------


def plan(
    config: DictConfig, checked: Checked, model: ModelSize | None, memory: DeviceMemory | None
) -> Iterator[Finding]:
    """Describe the run that the config makes; what is not known is left out."""
    trainer, data, settings = config.trainer, config.data, checked.settings
    yield Finding("run", f"{trainer.project_name}/{trainer.experiment_name}: {_trainer(config, settings)}")
    size = f"{model.parameters / 1e6:,.1f} M parameters" if model else "size not known: no config.json of a model"
    yield Finding("model", f"{config.actor_rollout_ref.model.path}: {size}")
    yield Finding("devices", f"{_devices(config)}; {cpus_for_ray(config)} CPUs for Ray")
    yield Finding(
        "batch",
        f"{settings.batch_groups} prompts x {settings.samples_per_group} samples; "
        f"prompts up to {data.max_prompt_length:,} tokens, responses up to {data.max_response_length:,}",
    )
    if chosen := settings.group_filter:
        yield Finding(
            "filter",
            f"prompts whose samples all have the same {chosen.metric} are replaced by others; "
            f"batches of prompts that a step may take: {chosen.max_num_gen_batches or 'no limit'}",
        )
    if checked.datasets:
        yield Finding("prompts", _prompts(config, checked))
        yield Finding("validation", _validation(config, checked.datasets[1]))
        yield Finding("first prompt", _first_prompt(config, checked, checked.datasets[0]))
    if checked.checkpoints:
        yield Finding("steps", _steps(checked.checkpoints, checked.last_step))
    for name, taken in (("update", memory.update), ("wake", memory.wake)) if memory else ():
        if taken:
            yield Finding(name, in_words(taken, config.recipe.gpu_gib))
    saved = "no checkpoints"
    if trainer.save_freq > 0:
        size = f" of {checkpoint_gib(config, model):.1f} GiB" if model else ""
        saved = f"a checkpoint every {trainer.save_freq} steps{size}, {machine.kept_checkpoints(config) or 'all'} kept"
    yield Finding("writes", f"{trainer.default_local_dir}: config, metrics, trace, {saved}; logger {trainer.logger}")


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


def _devices(config: DictConfig) -> str:
    trainer, rollout, engines = config.trainer, config.actor_rollout_ref.rollout, engine_devices(config)
    theirs = f"{trainer.nnodes} x {trainer.n_gpus_per_node} {trainer.device}"
    replicas = f"{max(1, (engines or trainer_devices(config)) // replica_devices(config))} engine replicas"
    own = f"{rollout.nnodes} x {rollout.n_gpus_per_node} for {replicas}; weights by {rollout.checkpoint_engine.backend}"
    return f"{theirs} for the trainer, {own}" if engines else f"{theirs}; {replicas}"


def _prompts(config: DictConfig, checked: Checked) -> str:
    """Describe the prompts of the training, and those that are too long."""
    most = config.data.max_prompt_length
    # Loaded with and without the limit: verl also drops rows that the chat template refuses, which are in neither.
    fit, of_any_length = (
        dataset_of(
            config, "train", checked.tokenizer, checked.processor, filter_overlong_prompts=True, max_prompt_length=limit
        )
        for limit in (most, 1 << 30)
    )
    kept, numbers = {*file_rows(fit)}, file_rows(of_any_length)
    lengths = [len(_ids(config, checked, of_any_length, i)) for i, row in enumerate(numbers) if row not in kept]
    longest = f" (the longest has {max(lengths):,})" if lengths else ""
    tried = f" ({MOST_TRIED} of them were tried)" if len(fit) > MOST_TRIED else ""
    return (
        f"{len(fit):,}{tried}, {len(fit) // config.data.train_batch_size:,} steps an epoch; "
        f"{len(lengths):,} others have more than {most:,} tokens{longest}"
    )


def _validation(config: DictConfig, dataset: Any) -> str:
    """Describe how many rows of the files the validation uses."""
    most, table = config.data.get("val_max_samples", -1), getattr(dataset, "dataframe", None)
    total = getattr(getattr(table, "data", None), "num_rows", len(dataset))
    capped = f" (data.val_max_samples={most})" if 0 < most < total else ""
    return f"{len(dataset):,} of {total:,} rows{capped}"


def _first_prompt(config: DictConfig, checked: Checked, dataset: Any) -> str:
    """The first prompt as the model reads it, and its length."""
    ids = _ids(config, checked, dataset, 0) if len(dataset) else []
    text = checked.tokenizer.decode(ids)
    parts = [text] if len(text) <= 600 else [text[:200], text[-400:]]
    return f"{len(ids):,} tokens: {' ... '.join(map(repr, parts))}"


def _ids(config: DictConfig, checked: Checked, dataset: Any, row: int) -> list[int]:
    """Tokens of the prompt of ``row``, with those that stand for its images."""
    content = dataset[row]
    if has_images(content.get(MESSAGES)):
        return processed(config, dataset, content, checked.processor)["input_ids"][0].tolist()
    rendering = rendering_of(config, dataset, content, checked.processor or checked.tokenizer)
    return checked.tokenizer.encode(rendering, add_special_tokens=False)


def _steps(checkpoints: Any, last: int) -> str:
    """Return as text how many steps are left, and the checkpoint from which the training resumes."""
    step, chosen = checkpoints.resumed_step, checkpoints.chosen
    if chosen and step >= last:
        return f"nothing to do: {chosen} is the checkpoint of the last step"
    return f"{last - step:,} of {last:,} are left" + (
        f", after step {step:,}: it resumes from {chosen}" if chosen else ""
    )
