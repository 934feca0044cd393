"""What verl's trainer needs of its own keys, with and without partial rollout: a rule a row.

verl finds out about these in a worker, a minute after the start, or not at all. Rules do not depend on their order: the
first that is broken is told.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.torch_dtypes import BFLOAT_LIST, FLOAT_LIST, HALF_LIST
from verl.utils.tracking import Tracking
from verl.workers.config import CriticConfig

from recipe.partial_rollout.config.settings import OVERLONG, engine_devices, trainer_devices
from recipe.partial_rollout.preflight.rule import (
    ACTOR,
    REF,
    ROLLOUT,
    Rule,
    Test,
    always,
    at,
    folder,
    least,
    off,
    one_of,
    share,
    shared,
    unset,
)
from verl_ext.guard import installed_pair

# -- sizes -------------------------------------------------------------------------------------------------------------


def replica_devices(config: DictConfig) -> int:
    """Devices of an engine replica."""
    rollout = config.actor_rollout_ref.rollout
    return prod((rollout.tensor_model_parallel_size, rollout.data_parallel_size, rollout.pipeline_model_parallel_size))


def longest(config: DictConfig) -> int:
    """Tokens of the longest sample."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.prompt_length + rollout.response_length


def split(config: DictConfig, engine: str) -> tuple[int, int]:
    """Devices that share the model of ``engine`` (actor, ref or critic), and those of them that share a sequence."""
    node = at(config, engine)
    if node.strategy == "megatron":
        megatron = node.megatron
        context = megatron.context_parallel_size
        return megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * context, context
    inner = node.get("fsdp_config") or node.get("fsdp") or {}
    sequence = max(node.get("ulysses_sequence_parallel_size") or 1, inner.get("ulysses_sequence_parallel_size") or 1)
    return sequence, sequence


def copies(config: DictConfig, engine: str) -> int:
    """Parts that ``engine`` divides a batch into."""
    return max(1, trainer_devices(config) // split(config, engine)[0])


def samples(config: DictConfig, key: str) -> int:
    """Samples of a batch of as many prompts as ``key`` says."""
    return at(config, key) * config.actor_rollout_ref.rollout.n


def with_critic(config: DictConfig) -> bool:
    return need_critic(config)


def with_reference(config: DictConfig) -> bool:
    return bool(need_reference_policy(config))


def filters(config: DictConfig) -> bool:
    """Whether groups of equal rewards are replaced."""
    return bool(at(config, "algorithm.filter_groups.enable"))


def scores_early(config: DictConfig) -> bool:
    """Whether rewards come while engines decode: a colocated reward model scores once they sleep."""
    model = config.reward.reward_model
    return not model.enable or model.enable_resource_pool


# -- rules -------------------------------------------------------------------------------------------------------------


def _budget(key: str, engine: str, when: Test, default: int = 0) -> Rule:
    """Tokens of a micro-batch, which cannot split a sample."""
    return Rule(
        key,
        lambda tokens, c: (tokens or default) * split(c, engine)[1] >= longest(c),
        lambda c: (
            f"at least {-(-longest(c) // split(c, engine)[1]):,}, the tokens of the longest sample "
            "(rollout.prompt_length + rollout.response_length)"
            + (f" on each of the {way} devices that share it" if (way := split(c, engine)[1]) > 1 else "")
        ),
        when,
    )


def _micro_batch(key: str, batch: str, engine: str, when: Test) -> Rule:
    """Samples of a micro-batch, of which a device gets a whole number."""

    def of_device(config: DictConfig) -> int:
        return samples(config, batch) // copies(config, engine)

    return Rule(
        key,
        lambda size, c: size and size > 0 and of_device(c) % size == 0,
        lambda c: f"a divisor of {of_device(c)}, a device's samples of {batch}; or actor.use_dynamic_bsz=True",
        when,
    )


def _passes() -> Iterator[Rule]:
    """Rules of the passes over a batch: update, log-probs, reference, values."""
    for node, name, flag, batch, engine, applies in (
        (ACTOR, "ppo", "use_dynamic_bsz", f"{ACTOR}.ppo_mini_batch_size", ACTOR, always),
        (ROLLOUT, "log_prob", "log_prob_use_dynamic_bsz", "data.train_batch_size", ACTOR, always),
        (REF, "log_prob", "log_prob_use_dynamic_bsz", "data.train_batch_size", REF, with_reference),
    ):
        dynamic = f"{node}.{flag}"
        yield _budget(f"{node}.{name}_max_token_len_per_gpu", engine, lambda c, a=applies, d=dynamic: a(c) and at(c, d))
        fixed: Test = lambda c, a=applies, d=dynamic: a(c) and not at(c, d)  # noqa: E731
        yield _micro_batch(f"{node}.{name}_micro_batch_size_per_gpu", batch, engine, fixed)
    # Values are always computed by tokens.
    yield _budget("critic.ppo_max_token_len_per_gpu", "critic", with_critic)
    yield _budget(
        "critic.ppo_infer_max_token_len_per_gpu", "critic", with_critic, CriticConfig.ppo_infer_max_token_len_per_gpu
    )


def _divided(mini: str, engine: str, when: Test = always) -> Iterator[Rule]:
    """Batch, mini-batch ``mini`` and devices of ``engine``."""
    yield Rule(
        mini,
        lambda size, c: size >= 1 and c.data.train_batch_size % size == 0,
        lambda c: f"a divisor of data.train_batch_size={c.data.train_batch_size}",
        when,
    )
    yield shared(mini, lambda c: samples(c, mini), lambda c: copies(c, engine), _N, "device(s)", when)
    yield shared(
        _GPUS, trainer_devices, lambda c: split(c, engine)[0], "trainer.nnodes", f"devices that share {engine}", when
    )


def loggers(given: Any) -> list[str]:
    """Names in ``trainer.logger``, which may be one."""
    return list(given) if OmegaConf.is_list(given) or isinstance(given, list) else [given]


def load_formats() -> Collection[str]:
    """Those that the installed vLLM knows, with any that a plugin of the user's has registered."""
    from vllm.model_executor import model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return model_loader._LOAD_FORMAT_TO_MODEL_LOADER


def _rejects(config: DictConfig) -> bool:
    """Whether verl can reject samples as ``algorithm.rollout_correction`` says."""
    correction, zeros = config.algorithm.rollout_correction, torch.zeros(1, 1)
    try:
        compute_rollout_rejection_mask(zeros, zeros + 1, correction.rollout_rs, correction.rollout_rs_threshold)
    except (TypeError, ValueError):
        return False
    return True


_BATCH, _GPUS, _N = "data.train_batch_size", "trainer.n_gpus_per_node", f"{ROLLOUT}.n"
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
_DRAFTS = f"{ROLLOUT}.engine_kwargs.vllm.speculative_config"
_DRAFTS_KILL = "0.24.0"
"""the vLLM whose asynchronous scheduler loses count of draft tokens when it preempts"""
_FILTER = "algorithm.filter_groups"
_KL = [name + end for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for end in ("", "+")]
_DTYPES = {name for name in (*HALF_LIST, *FLOAT_LIST, *BFLOAT_LIST) if isinstance(name, str)}
_MEANS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_LOSS = f"{ACTOR}.policy_loss.loss_mode"
_SAMPLING = (ROLLOUT, f"{ROLLOUT}.val_kwargs")


def _uses_groups(config: DictConfig) -> bool:
    return config.algorithm.adv_estimator in _GROUPED


def _fsdp(config: DictConfig) -> bool:
    return config.actor_rollout_ref.actor.strategy != "megatron"


def _names_files(files: Any, _: DictConfig) -> bool:
    return bool(files) and not isinstance(files, int)


def _synchronous(config: DictConfig) -> bool:
    return not config.partial_rollout.enable


def _overlong(config: DictConfig) -> bool:
    overlong = at(config, OVERLONG)
    return bool(overlong and overlong.enable) and config.reward.reward_manager.name == "dapo"


def _drafts_kill(config: DictConfig) -> bool:
    method = str(at(config, f"{_DRAFTS}.method") or "")
    return installed_pair().vllm == _DRAFTS_KILL and (method.startswith("eagle") or "mtp" in method)


RULES = (
    # what there is to train
    Rule("trainer.use_v1", lambda v1, _: v1 is False, "False: the recipe subclasses verl's RayPPOTrainer"),
    Rule(
        "model_engine",
        lambda engine, _: engine in (None, "dp"),
        "dp: the recipe switches engines by engine=fsdp2 or engine=megatron",
    ),
    least("trainer.total_epochs", 1),
    least("trainer.total_training_steps", 1, or_null=True),
    *(least(key, 1) for key in (_BATCH, _N, _GPUS, "trainer.nnodes")),
    *(least(f"{ROLLOUT}.{part}_length", 1) for part in ("prompt", "response")),
    *(least(f"{ROLLOUT}.{way}_parallel_size", 1) for way in ("tensor_model", "data", "pipeline_model")),
    least("data.val_batch_size", 1, or_null=True),
    *(least(key, 0, or_null=True) for key in ("data.seed", f"{ROLLOUT}.seed", "data.dataloader_num_workers")),
    shared(_BATCH, lambda c: samples(c, _BATCH), trainer_devices, _N, "device(s)"),
    Rule(
        "data.gen_batch_size",
        lambda batch, c: batch in (None, c.data.train_batch_size),
        lambda c: f"null, or data.train_batch_size={c.data.train_batch_size}",
    ),
    Rule(
        f"{ROLLOUT}.response_length",
        lambda _, c: (most := c.actor_rollout_ref.rollout.max_model_len) is None or longest(c) <= most,
        lambda c: (
            f"with prompt_length={c.actor_rollout_ref.rollout.prompt_length} it must fit "
            f"rollout.max_model_len={c.actor_rollout_ref.rollout.max_model_len}"
        ),
    ),
    *(Rule(f"data.{part}_files", _names_files, "a parquet file, or a list of them") for part in ("train", "val")),
    Rule(
        f"{ROLLOUT}.prompt_length",
        lambda tokens, c: tokens >= c.data.max_prompt_length,
        lambda c: f"at least data.max_prompt_length={c.data.max_prompt_length}: longer prompts would be cut",
    ),
    # dynamic sampling
    Rule(
        f"{_FILTER}.enable",
        lambda on, c: not on or c.partial_rollout.enable,
        "False with partial_rollout.enable=False: verl's v0 trainer ignores it",
    ),
    Rule(
        f"{_FILTER}.enable",
        lambda on, c: not on or c.actor_rollout_ref.rollout.n >= 2,
        "False with actor_rollout_ref.rollout.n=1: a sample is equal to itself",
    ),
    Rule(
        f"{_FILTER}.enable",
        lambda on, c: not on or scores_early(c),
        "False, or reward.reward_model.enable_resource_pool=True: colocated it scores too late",
    ),
    Rule(
        f"{_FILTER}.max_inflight_gen_batches",
        lambda batches, _: batches in (None, 1),
        "1: partial_rollout.overlap says how much is in flight",
        filters,
    ),
    Rule(
        f"{_FILTER}.metric",
        lambda metric, c: not (metric == "seq_final_reward" and c.algorithm.use_kl_in_reward),
        "reward with use_kl_in_reward=True: its penalty is known in training only",
        filters,
    ),
    # algorithm and loss
    one_of("algorithm.adv_estimator", ADV_ESTIMATOR_REGISTRY),
    Rule(
        f"{ROLLOUT}.n",
        lambda n, _: n >= 2,
        lambda c: (
            f"at least 2 with algorithm.adv_estimator={c.algorithm.adv_estimator}, whose baseline is a prompt's other "
            "samples (1 is verl's default; the recipes have 8)"
        ),
        _uses_groups,
    ),
    one_of(_LOSS, POLICY_LOSS_REGISTRY),
    Rule(
        _LOSS,
        lambda mode, _: mode != "geo_mean",
        "any other: verl averages it in each micro-batch and adds these up, so its gradient grows with their number",
    ),
    one_of(f"{ACTOR}.kl_loss_type", _KL, lambda c: c.actor_rollout_ref.actor.use_kl_loss),
    one_of("algorithm.kl_penalty", _KL, lambda c: c.algorithm.use_kl_in_reward),
    one_of("algorithm.kl_ctrl.type", ("fixed", "adaptive"), lambda c: c.algorithm.use_kl_in_reward),
    Rule(f"{ACTOR}.clip_ratio_c", lambda c, _: c and c > 1, "above 1: verl asserts it", _synchronous),
    one_of(f"{ACTOR}.loss_agg_mode", _MEANS),
    Rule(
        "algorithm.rollout_correction.rollout_rs",
        lambda rejection, c: rejection is None or _rejects(c),
        "null, or modes such as token_k1 or seq_mean_k3 with a rollout_rs_threshold that fits them",
    ),
    least(f"{ACTOR}.ppo_epochs", 1),
    least(f"{ACTOR}.optim.lr", 0),
    Rule(f"{ACTOR}.optim.clip_grad", lambda norm, _: norm and norm > 0, "above 0: a gradient's largest norm", _fsdp),
    Rule(
        f"{ACTOR}.checkpoint.save_contents",
        lambda parts, _: "model" in parts and {*parts} <= {"model", "optimizer", "extra", "hf_model"},
        "a list of model, optimizer, extra, hf_model, with model: a resume would go on from the first weights",
    ),
    one_of(f"{ACTOR}.strategy", ("fsdp", "fsdp2", "megatron"), why=" (engine=fsdp2, engine=megatron)"),
    one_of(f"{ACTOR}.optim.lr_scheduler_type", ("constant", "cosine"), _fsdp),
    one_of("trainer.device", ("cpu", "cuda", "npu")),
    one_of(f"{ACTOR}.fsdp_config.model_dtype", _DTYPES, lambda c: at(c, f"{ACTOR}.fsdp_config") is not None),
    # how a batch is divided
    *_divided(f"{ACTOR}.ppo_mini_batch_size", ACTOR),
    *_divided("critic.ppo_mini_batch_size", "critic", with_critic),
    Rule(
        f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        lambda flag, c: flag == c.actor_rollout_ref.actor.use_dynamic_bsz,
        lambda c: f"as {ACTOR}.use_dynamic_bsz={c.actor_rollout_ref.actor.use_dynamic_bsz}: verl's worker asserts it",
    ),
    *_passes(),
    Rule(
        "critic.ppo_micro_batch_size_per_gpu",
        lambda size, _: size and size > 0,
        "at least 1, or critic.use_dynamic_bsz=True",
        lambda c: with_critic(c) and not c.critic.use_dynamic_bsz,
    ),
    Rule(
        "critic.forward_max_token_len_per_gpu",
        lambda tokens, c: tokens == c.critic.ppo_max_token_len_per_gpu,
        "that of critic.ppo_max_token_len_per_gpu: verl reads critic.ppo_infer_max_token_len_per_gpu instead",
        with_critic,
    ),
    # engines
    Rule(f"{ROLLOUT}.mode", lambda mode, _: mode == "async", "async: verl has no other"),
    Rule(
        f"{ROLLOUT}.tensor_model_parallel_size",
        lambda _, c: trainer_devices(c) % replica_devices(c) == 0,
        lambda c: f"whole replicas on {trainer_devices(c)} device(s); one has {replica_devices(c)}",
        lambda c: not engine_devices(c),
    ),
    Rule(f"{ROLLOUT}.temperature", lambda value, _: value > 0, "above 0: log-probs are taken at it"),
    least(f"{ROLLOUT}.val_kwargs.temperature", 0),
    least(f"{ROLLOUT}.val_kwargs.n", 1),
    *(Rule(f"{node}.top_k", lambda k, _: k == -1 or k >= 1, "-1 for all tokens, or at least 1") for node in _SAMPLING),
    *(share(f"{node}.top_p") for node in _SAMPLING),
    *(least(f"{ROLLOUT}.max_num_{name}", 1) for name in ("seqs", "batched_tokens")),
    one_of(f"{ROLLOUT}.scheduling_policy", ("fcfs", "priority")),
    share(f"{ROLLOUT}.gpu_memory_utilization"),
    Rule(
        f"{_DRAFTS}.method",
        lambda _, c: not _drafts_kill(c),
        f"null or ngram with vLLM {_DRAFTS_KILL}, whose engine can die with it when it preempts (vllm#48245)",
    ),
    Rule(
        _DRAFTS,
        lambda drafts, _: not drafts,
        "null with trainer.device=cpu: vLLM's proposers change there what is sampled "
        "(python -m tests.bench distribution shows it)",
        lambda c: c.trainer.device == "cpu",
    ),
    Rule(
        f"{ROLLOUT}.load_format",
        lambda name, _: name.lower() in load_formats(),
        lambda _: "one of " + ", ".join(sorted(load_formats())),
        lambda c: c.actor_rollout_ref.rollout.name == "vllm" and c.actor_rollout_ref.rollout.load_format != "dummy",
    ),
    one_of(f"{ROLLOUT}.dtype", ("auto", "half", "float16", "bfloat16", "float", "float32")),
    least(f"{ROLLOUT}.agent.num_workers", 1),
    least("reward.num_workers", 1),
    # rewards
    Rule(
        "partial_rollout.reward_in_worker",
        lambda inside, c: not (inside and c.reward.reward_model.enable),
        "False with reward.reward_model.enable=True",
    ),
    Rule(
        "reward.reward_kwargs.max_resp_len",
        lambda limit, _: isinstance(limit, int) and limit >= 1,
        "tokens: ${data.max_response_length}",
        _overlong,
    ),
    Rule(
        f"{OVERLONG}.len",
        lambda length, c: length is None or 0 < length <= c.reward.reward_kwargs.max_resp_len,
        lambda c: (
            f"1 to reward.reward_kwargs.max_resp_len={c.reward.reward_kwargs.max_resp_len}, or null for a fifth of it"
        ),
        _overlong,
    ),
    # the recipe has parts of its own there
    Rule(
        f"{ROLLOUT}.agent.agent_loop_manager_class",
        lambda name, _: name is None or name.startswith("recipe.partial_rollout."),
        "null: the recipe has its own; loops of yours go into agent_loop_config_path",
    ),
    unset(f"{ROLLOUT}.checkpoint_manager_class", "the recipe has its own"),
    unset("trainer.checkpoint_callback_class", "verl's v1 trainer alone calls it"),
    # what a run writes
    Rule(
        "trainer.project_name",
        lambda name, _: re.fullmatch(r"[\w+.-]{1,100}", str(name), re.ASCII),
        "up to 100 letters, digits and _ + - ., as swanlab takes it",
        lambda c: "swanlab" in loggers(c.trainer.logger),
    ),
    Rule(
        "trainer.logger",
        lambda given, _: given is not None and {*loggers(given)} <= {*Tracking.supported_backend, "tracking"},
        "a list of " + ", ".join(Tracking.supported_backend),
    ),
    one_of("trainer.resume_mode", ("auto", "disable", "resume_path")),
    Rule(
        "trainer.resume_from_path",
        lambda path, _: path and re.fullmatch(r"global_step_\d+", Path(str(path)).name) and Path(str(path)).is_dir(),
        "an existing .../global_step_K with trainer.resume_mode=resume_path",
        lambda c: c.trainer.resume_mode == "resume_path",
    ),
    unset("trainer.default_hdfs_dir", "checkpoints are saved locally only"),
    *(off(f"{node}.checkpoint.async_save", "a checkpoint is sealed when it is whole") for node in (ACTOR, "critic")),
    Rule("trainer.default_local_dir", lambda path, _: path, "a directory"),
    *(folder(f"trainer.{name}") for name in ("default_local_dir", "rollout_data_dir", "validation_data_dir")),
)
