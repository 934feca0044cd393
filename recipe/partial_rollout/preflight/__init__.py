"""The checks of a run before Ray starts: one list in one order.

A run ends at the first mistake. ``--check`` prints each mistake as a finding and goes on. Both make the same checks,
except that ``--check`` passes verl's own modes of ``trainer.v1.trainer_mode``, which a run refuses. What comes after the
checks can still refuse a run: a lock on its directory, or a Ray with too few devices or CPUs.

The checks start nothing, and write nothing but caches, such as those of ``datasets`` and of the hub. After them
``main_ppo.begin`` makes and locks the run's directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints
from recipe.partial_rollout.config.keys import ConfigError, fail, refusing
from recipe.partial_rollout.config.settings import ROOT, PartialRolloutConfig, verls_own
from recipe.partial_rollout.preflight.columns import check_columns
from recipe.partial_rollout.preflight.inputs import (
    MODEL,
    cache_by_content,
    check_device,
    check_noise,
    check_positions,
    check_ray_address,
    missing_inputs,
    missing_packages,
    size_bucket,
)
from recipe.partial_rollout.preflight.resumption import check_checkpoints, check_made_of_rows
from recipe.partial_rollout.preflight.rows import check_left_out, check_rows, dataset_of
from recipe.partial_rollout.preflight.rules import check_rules
from recipe.partial_rollout.preflight.user_code import check_by_verl, check_code, find_tools, import_libraries
from recipe.partial_rollout.preflight.verl_keys import check_verl_keys, resolved, write_in_full
from recipe.partial_rollout.preflight.vllm_contract import check_vllm
from recipe.partial_rollout.training.trackers import check_trackers
from recipe.partial_rollout.training.trainer_config import check_schedule, choose_attention
from verl_ext.command import foreign_recipe

Kind = Literal["setting", "missing"]
Refuse = Callable[[Kind, ConfigError], None]


class Checked(NamedTuple):
    """Objects that the checks have loaded.

    If ``--check`` has refused an input, all but ``settings`` may have their defaults.
    """

    settings: PartialRolloutConfig
    checkpoints: RunCheckpoints | None = None
    """also None if one of verl's own v1 trainers runs the config (``verls_own``)"""
    tokenizer: Any = None
    processor: Any = None
    datasets: tuple[Any, Any] | None = None
    """(training, validation)"""
    last_step: int = 0
    """global step at which the training ends: by its data, or by ``trainer.total_training_steps``"""


def _raise(_: Kind, error: ConfigError) -> None:
    raise error


def checked(config: DictConfig, refuse: Refuse = _raise) -> Checked:
    """Run all checks on ``config``. Complete it in place: absolute paths, interpolations, attention, bucket size.

    Args:
        refuse: called with each mistake; the default raises it.

    Raises:
        ConfigError: raised by ``refuse``; or, whatever ``refuse`` does, for a mistake after which no other check can
        run.
    """
    if foreign := foreign_recipe():
        raise ConfigError(foreign)
    if ROOT not in config:
        raise ConfigError(f"{ROOT}: the config has no such section; add {ROOT} to its defaults, after ppo_trainer")
    # First, because later checks would fail on what the platform or the engine lacks.
    # If trainer is no section of keys, check_verl_keys refuses it.
    if OmegaConf.is_dict(config.trainer):
        _run(check_device, config, "missing", refuse)
    _run(check_vllm, config, "missing", refuse)
    settings = check_settings(config, refuse)
    _run(check_ray_address, config, "missing", refuse)
    if not _run(missing_packages, config, "missing", refuse):
        _run(lambda config: check_trackers(config.trainer.logger), config, "setting", refuse)
    if _run(missing_inputs, config, "missing", refuse):
        return Checked(settings)
    # It builds the model from its config, so the model must be there.
    size_bucket(config)
    try:
        return _load(config, settings, refuse)
    except ConfigError as error:
        refuse("setting", error)
        return Checked(settings)


def check_settings(config: DictConfig, refuse: Refuse = _raise) -> PartialRolloutConfig:
    """Check keys, their relations, and the code that they name; return the settings.

    ``config`` is completed in place: attention, interpolations, absolute paths.

    Args:
        refuse: called with each mistake; the default raises it.

    Raises:
        ConfigError: raised by ``refuse``; or, whatever ``refuse`` does, for an unknown key, a value that is not
            allowed, an interpolation without a value, or a flash-attn that is asked for and not installed.
    """
    check_verl_keys(resolved(config))
    choose_attention(config)
    # verl instantiates parts of the config detached from its root, where interpolations would not resolve.
    OmegaConf.resolve(config)
    write_in_full(config)
    settings = PartialRolloutConfig.from_config(config)
    # Tools and libraries may register what later checks look for.
    for check in (
        find_tools,
        import_libraries,
        check_rules,
        check_by_verl,
        lambda config: check_code(config, settings),
    ):
        _run(check, config, "setting", refuse)
    return settings


def _load(config: DictConfig, settings: PartialRolloutConfig, refuse: Refuse) -> Checked:
    """Load what the run trains on, and check it against the settings and against the checkpoint to resume."""
    checkpoints = None if verls_own(config) else check_checkpoints(config)
    with refusing(
        MODEL, config.actor_rollout_ref.model.path, "a model whose tokenizer and configuration verl can load"
    ):
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    check_positions(config, model.hf_config)
    if settings.enable and not verls_own(config):
        check_noise(config, model.hf_config)
    cache_by_content(config)
    train, val = (dataset_of(config, split, model.tokenizer, model.processor) for split in ("train", "val"))
    for split, dataset in (("train", train), ("val", val)):
        key = f"data.{split}_files"
        check_columns(config, dataset, key)
        check_rows(config, settings, dataset, key, model.processor or model.tokenizer)
        check_left_out(config, dataset, split, model.tokenizer, model.processor)
    if not len(val):
        # verl would give the loader of the validation batches of 0.
        allowed = f"at least one row that fits data.max_prompt_length={config.data.max_prompt_length}; none does"
        refuse("setting", fail("data.val_files", config.data.val_files, allowed))
    if len(train) < (batch := config.data.train_batch_size):
        allowed = f"at most {len(train)}, the prompts of data.train_files that fit data.max_prompt_length"
        refuse("setting", fail("data.train_batch_size", batch, f"{allowed} and that the chat template takes"))
    elif checkpoints is not None:
        check_schedule(config, len(train))
    if checkpoints is not None:
        check_made_of_rows(config, checkpoints, train)
    last = len(train) // batch * config.trainer.total_epochs
    last = min(config.trainer.total_training_steps or last, last)
    return Checked(settings, checkpoints, model.tokenizer, model.processor, (train, val), last)


def _run(
    check: Callable[[DictConfig], Iterable[ConfigError] | None], config: DictConfig, kind: Kind, refuse: Refuse
) -> list[ConfigError]:
    """Call ``refuse`` for each mistake that ``check`` yields or raises, and return the mistakes."""
    errors: list[ConfigError] = []
    try:
        errors += check(config) or ()
    except ConfigError as error:
        errors.append(error)
    for error in errors:
        refuse(kind, error)
    return errors
