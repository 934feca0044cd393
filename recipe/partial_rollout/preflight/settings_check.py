"""Checks of the whole configuration that read no file but checkpoints: verl's keys that partial rollout depends on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, RolloutReplica

from recipe.partial_rollout.checkpoint.manifest import verify
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints
from recipe.partial_rollout.checkpoint.snapshot import ForeignCheckpointError, TornCheckpointError
from recipe.partial_rollout.config.choices import ResumeKV
from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.config.resume_sizes import ResumeSizes
from recipe.partial_rollout.config.settings import OVERLONG, PartialRolloutConfig, check_keys, trainer_devices
from recipe.partial_rollout.preflight.inputs import (
    check_critic,
    check_vocabulary,
    find_tools,
    missing_inputs,
    missing_packages,
    size_bucket,
)
from recipe.partial_rollout.preflight.placement_check import check_placement
from recipe.partial_rollout.training.trainer_config import check_correction
from verl_ext.guard import installed_pair

_GROUPED = (
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
)
"""advantage estimators with a baseline made of a prompt's other samples"""
_ROLLOUT = "actor_rollout_ref.rollout"
_REQUIRED = (
    (f"{_ROLLOUT}.name", "vllm", "other engines are not interrupted by it"),
    (f"{_ROLLOUT}.calculate_log_probs", True, "samples span policy versions, so the engine's own log-probs are needed"),
    (
        f"{_ROLLOUT}.enable_rollout_routing_replay",
        False,
        "an interrupted sample loses the routes of its earlier tokens",
    ),
    (f"{_ROLLOUT}.disaggregation.enabled", False, "an interrupted sample is prefilled again where it is decoded"),
    (f"{_ROLLOUT}.full_determinism", False, "every request is seeded alike, so a resumed sample would draw old noise"),
)
"""verl's keys, the value that partial rollout needs, and why"""
_DRAFTS_KILL = "0.24.0"
"""the vLLM whose asynchronous scheduler loses count of draft tokens when it preempts"""


def check_config(config: DictConfig) -> PartialRolloutConfig:
    """Raise ``ConfigError`` for the first mistake in settings or inputs; returns the checked settings.

    Flags in ``config`` become bools, paths of tools absolute, and a bucket of the weight sync that is null gets its size.
    """
    settings = check_settings(config)
    find_tools(config)
    for error in (*missing_packages(config), *missing_inputs(config)):
        raise error
    check_vocabulary(config)
    check_critic(config)
    size_bucket(config)
    return settings


def check_settings(config: DictConfig) -> PartialRolloutConfig:
    """Raise ``ConfigError`` for the first mistake found; returns the checked settings. Flags in ``config`` become bools."""
    check_keys(config)
    settings = PartialRolloutConfig.from_config(config)
    _check_trainer(config, settings)
    _check_speculation(config)
    _check_budget(config)
    _check_filter(config, settings)
    _check_group(config, settings.samples_per_group)
    _check_overlong(config)
    if settings.enable:
        _check_partial_rollout(config)
        _check_slots(config, settings)
        check_placement(config, settings)
        check_correction(config, settings)
    return settings


def _check_trainer(config: DictConfig, settings: PartialRolloutConfig) -> None:
    if config.trainer.get("use_v1", True):
        raise fail("trainer.use_v1", True, "False: the recipe subclasses verl's RayPPOTrainer")
    if config.get("model_engine", "dp") != "dp":
        raise fail(
            "model_engine", config.model_engine, "dp: the recipe switches engines by engine=fsdp2 or engine=megatron"
        )
    devices = trainer_devices(config)
    if config.partial_rollout.reward_in_worker and config.reward.reward_model.enable:
        raise fail("partial_rollout.reward_in_worker", True, "False with reward.reward_model.enable=True")
    if devices < 1:
        raise fail("trainer.n_gpus_per_node", config.trainer.n_gpus_per_node, "an integer of at least 1")
    batch, n = settings.batch_groups, settings.samples_per_group
    if batch * n % devices:
        raise fail("data.train_batch_size", batch, f"times rollout.n={n} it must be divisible by {devices} device(s)")
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini < 1 or batch % mini:
        raise fail("actor_rollout_ref.actor.ppo_mini_batch_size", mini, f"a divisor of data.train_batch_size={batch}")
    if config.data.get("gen_batch_size") not in (None, batch):
        raise fail("data.gen_batch_size", config.data.gen_batch_size, f"null, or data.train_batch_size={batch}")


def _check_filter(config: DictConfig, settings: PartialRolloutConfig) -> None:
    """Check ``algorithm.filter_groups`` (dynamic sampling), which verl's v0 trainer does not implement."""
    group_filter, at = settings.group_filter, "algorithm.filter_groups"
    if group_filter is None:
        return
    if not settings.enable:
        raise fail(f"{at}.enable", True, "False with partial_rollout.enable=False: verl's v0 trainer ignores it")
    if settings.samples_per_group < 2:
        raise fail(f"{at}.enable", True, "False with actor_rollout_ref.rollout.n=1: a sample is equal to itself")
    inflight = config.algorithm.filter_groups.get("max_inflight_gen_batches", 1)
    if inflight != 1:
        raise fail(f"{at}.max_inflight_gen_batches", inflight, "1: partial_rollout.overlap says how much is in flight")
    if group_filter.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        raise fail(
            f"{at}.metric",
            group_filter.metric,
            "reward with use_kl_in_reward=True: its penalty is known in training only",
        )
    model = config.reward.reward_model
    if model.enable and not model.enable_resource_pool:
        raise fail(
            f"{at}.enable",
            True,
            "False, or reward.reward_model.enable_resource_pool=True: colocated it scores too late",
        )


def _check_group(config: DictConfig, n: int) -> None:
    estimator = config.algorithm.adv_estimator
    if n < 2 and estimator in _GROUPED:
        raise fail(
            "actor_rollout_ref.rollout.n",
            n,
            f"at least 2 with algorithm.adv_estimator={estimator}, whose baseline is a prompt's other samples "
            "(1 is verl's default; the recipes have 8)",
        )


def _check_overlong(config: DictConfig) -> None:
    """Check the overlong penalty; verl's dapo reward manager would fail with an assertion in its worker."""
    overlong = OmegaConf.select(config, OVERLONG)
    if not overlong or not overlong.enable or config.reward.reward_manager.name != "dapo":
        return
    limit, length = config.reward.reward_kwargs.get("max_resp_len"), overlong.get("len")
    if not isinstance(limit, int) or limit < 1:
        raise fail("reward.reward_kwargs.max_resp_len", limit, "tokens: ${data.max_response_length}")
    if length is not None and not 0 < length <= limit:
        raise fail(
            f"{OVERLONG}.len", length, f"1 to reward.reward_kwargs.max_resp_len={limit}, or null for a fifth of it"
        )


def _check_speculation(config: DictConfig) -> None:
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
    speculative = OmegaConf.select(config, key)
    method = str((speculative or {}).get("method", ""))
    if installed_pair().vllm == _DRAFTS_KILL and (method.startswith("eagle") or "mtp" in method):
        raise fail(
            f"{key}.method",
            method,
            f"null or ngram with vLLM {_DRAFTS_KILL}, whose engine can die with it when it preempts (vllm#48245)",
        )
    if config.trainer.device == "cpu" and speculative:
        raise fail(
            key,
            speculative,
            "null with trainer.device=cpu: vLLM's proposers change there what is sampled "
            "(python -m tests.bench distribution shows it)",
        )


def _check_budget(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    for key, value in (("prompt_length", rollout.prompt_length), ("response_length", rollout.response_length)):
        if value < 1:
            raise fail(f"actor_rollout_ref.rollout.{key}", value, "at least 1 token")
    needed = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and needed > rollout.max_model_len:
        raise fail(
            "actor_rollout_ref.rollout.response_length",
            rollout.response_length,
            f"with prompt_length={rollout.prompt_length} it must fit rollout.max_model_len={rollout.max_model_len}",
        )


def _check_partial_rollout(config: DictConfig) -> None:
    for key, wanted, why in _REQUIRED:
        if (value := OmegaConf.select(config, key) or False) != wanted:
            raise fail(key, value, f"with partial_rollout.enable=True it must be {wanted}: {why}")
    for engine in ("megatron", "veomni"):
        key = f"actor_rollout_ref.actor.{engine}.router_replay.mode"
        mode = OmegaConf.select(config, key) or "disabled"
        if mode != "disabled":
            raise fail(key, mode, "disabled with partial_rollout.enable=True: routes are not kept over interruptions")
    if config.partial_rollout.resume_kv == ResumeKV.KEEP:
        _check_kept_kv(config.actor_rollout_ref.rollout)
    check_checkpoints(config)
    if not config.partial_rollout.drain and config.trainer.save_freq <= 0:
        print(
            "warning: partial_rollout.drain=False with trainer.save_freq=-1: "
            "no checkpoint keeps what is in flight at the end",
            file=sys.stderr,
        )
    if config.algorithm.adv_estimator == "remax":
        raise fail("algorithm.adv_estimator", "remax", "any other: its greedy baseline needs the synchronous rollout")


def _check_slots(config: DictConfig, settings: PartialRolloutConfig) -> None:
    """Leave the server's actor calls for its control: an interruption that queues behind samples comes when they end."""
    server: Any = RolloutReplica.max_concurrency
    calls = server.fget(SimpleNamespace(config=config.actor_rollout_ref.rollout))
    most = calls - CONTROL_METHOD_CONCURRENCY
    if settings.slots_per_replica > most:
        raise fail(
            "partial_rollout.slots_per_replica",
            settings.slots_per_replica,
            f"at most {most}: verl's server takes {calls} calls at once, {CONTROL_METHOD_CONCURRENCY} of them for control "
            f"(more with a larger actor_rollout_ref.rollout.max_num_seqs)",
        )


def _check_kept_kv(rollout: DictConfig) -> None:
    if rollout.free_cache_engine:
        raise fail(
            "partial_rollout.resume_kv",
            "keep",
            "recompute with actor_rollout_ref.rollout.free_cache_engine=True: an engine that sleeps gives its KV cache up, "
            "and the recipe does not use vLLM's KV offloading",
        )
    if not rollout.enable_prefix_caching:
        raise fail(
            "partial_rollout.resume_kv", "keep", "recompute with actor_rollout_ref.rollout.enable_prefix_caching=False"
        )


# -- checkpoints -------------------------------------------------------------------------------------------------------


def check_checkpoints(config: DictConfig) -> None:
    """Raise ``ConfigError`` where the checkpoint that ``trainer.resume_mode`` asks for cannot be resumed."""
    trainer, mode = config.trainer, config.trainer.resume_mode
    if mode not in ("auto", "resume_path", "disable"):
        raise fail("trainer.resume_mode", mode, "one of auto, resume_path, disable")
    path = trainer.get("resume_from_path")
    if mode == "resume_path" and not (path and Path(str(path)).is_dir() and "global_step_" in Path(str(path)).name):
        raise fail(
            "trainer.resume_from_path", path, "an existing .../global_step_K with trainer.resume_mode=resume_path"
        )
    if trainer.get("default_hdfs_dir"):
        raise fail(
            "trainer.default_hdfs_dir", trainer.default_hdfs_dir, "null: what is in flight is saved locally only"
        )
    for part in ("actor_rollout_ref.actor", "critic"):
        if OmegaConf.select(config, f"{part}.checkpoint.async_save"):
            raise fail(f"{part}.checkpoint.async_save", True, "False: a checkpoint is sealed when it is whole")
    try:
        found = RunCheckpoints(Path(trainer.default_local_dir)).to_resume(mode, path)
    except (TornCheckpointError, ForeignCheckpointError) as error:
        raise fail("trainer.resume_mode", mode, str(error)) from error
    if found is not None:
        _check_sizes(found, PartialRolloutConfig.from_config(config))
        _check_trainers(found, trainer.nnodes * trainer.n_gpus_per_node)


def _check_sizes(checkpoint: Path, settings: PartialRolloutConfig) -> None:
    saved = verify(checkpoint).facts["sizes"]
    theirs = ResumeSizes(saved["batch_groups"], saved["samples_per_group"], saved["max_staleness"])
    if other := settings.resume_sizes.mismatch(theirs):
        raise fail(other.key, other.here, other.allowed_by(f"as in {checkpoint}"))
    if saved.get("filter_groups") and settings.group_filter is None:
        raise fail(
            "algorithm.filter_groups.enable", False, f"True, as in {checkpoint}: it consumed more than it trained"
        )


def _check_trainers(checkpoint: Path, trainers: int) -> None:
    """FSDP's shards belong to a number of trainers, on whichever nodes; Megatron's checkpoints have no such file."""
    path = checkpoint / "actor" / "fsdp_config.json"
    saved = json.loads(path.read_text())["world_size"] if path.exists() else trainers
    if saved != trainers:
        key = "trainer.nnodes * trainer.n_gpus_per_node"
        raise fail(key, trainers, f"{saved}, as in {checkpoint}: its shards belong to that many trainers")
