"""``main_ppo --check``: every check that needs no GPU and no Ray, then the plan."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.choices import Placement
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.cluster import Cluster
from recipe.partial_rollout.planner.engine_curve import PRESETS
from recipe.partial_rollout.planner.forecast import baseline, forecast
from recipe.partial_rollout.planner.lengths import lognormal
from recipe.partial_rollout.preflight.checkpoints import check_rows
from recipe.partial_rollout.preflight.inputs import check_vocabulary, missing_inputs, shape_of
from recipe.partial_rollout.preflight.machine import machine_problems, missing_packages
from recipe.partial_rollout.preflight.memory import DeviceMemory, check_memory, size_bucket
from recipe.partial_rollout.preflight.plan import Sizes, lines
from recipe.partial_rollout.preflight.prompts import check_prompts, prompt_lengths
from recipe.partial_rollout.preflight.settings_check import check_settings

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
    _check_verl(config)
    missing = list(missing_inputs(config))
    prompts = None if missing else _check_contents(config)
    shape = shape_of(config)
    missing += [*missing_packages(config), *machine_problems(config, shape)]
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
    return copy


def _check_verl(config: DictConfig) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(
                config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
            )
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"verl refuses the configuration: {(str(error).splitlines() or ['an assertion'])[0]}"
        ) from error


def _check_contents(config: DictConfig) -> str:
    """Check tokenizer, weight sync, prompts and columns; what the plan says of them."""
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.utils.tokenizer import hf_tokenizer

    check_vocabulary(config)
    size_bucket(config)
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
    lengths, limit = prompt_lengths(unfiltered, tokenizer, dataset), config.data.max_prompt_length
    over = int((lengths > limit).sum())
    median, longest = np.quantile(lengths, (0.5, 1.0))
    steps = (len(lengths) - over) // PartialRolloutConfig.from_config(config).batch_groups
    return (
        f"{len(lengths):,}, median {median:.0f} tokens, longest {longest:.0f}; {over:,} longer than {limit:,} are left "
        f"out; {steps:,} steps an epoch"
    )


def _expected(config: DictConfig, settings: PartialRolloutConfig, sizes: Sizes, memory: DeviceMemory | None) -> str:
    """What the planner's simulation says, for assumed lengths and an assumed engine."""
    if settings.placement is Placement.SEPARATE:
        return "not forecast: the split decides; python -m recipe.partial_rollout.tools plan --placement separate"
    if sizes.in_flight > _MOST_FORECAST:
        return "not forecast: too many samples for a check of seconds; python -m recipe.partial_rollout.tools plan"
    cap, n = config.data.max_response_length, settings.samples_per_group
    lengths = lognormal(median=cap * _MEDIAN, mean=cap * _MEAN, cap=cap, samples_per_group=n)
    curve = replace(PRESETS[_CURVE], kv_tokens=memory.kv_tokens if memory else None)
    cluster = Cluster(curve, sizes.replicas, sizes.seats, keeps_kv=str(settings.resume_kv) == "keep")
    admission = Admission.of(settings)
    found = forecast(admission, settings.scheduling, cluster, lengths, rounds=_ROUNDS)
    base = forecast(baseline(admission), settings.scheduling, cluster, lengths, rounds=_ROUNDS)
    return (
        f"staleness mean {found.staleness_mean:.2f}, p95 {found.staleness_p95:.0f}, max {found.staleness_max}; rollout "
        f"{base.trained_tokens_per_s / found.trained_tokens_per_s:.2f} of noPR's time (assumed, not measured: lognormal "
        f"lengths, median {cap * _MEDIAN:,.0f}, mean {cap * _MEAN:,.0f}; engine {_CURVE})"
    )
