"""Relations between keys, and what partial rollout needs of verl's: a rule a row. They do not depend on their order.

verl's own keys are verl's to check, unless a wrong value would silently train something else, or everybody meets it in the
first hour. verl's rollout correction is off by default, and several settings make verl ignore it without a warning: rules
here refuse them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from math import inf
from pathlib import Path

from omegaconf import DictConfig
from ray._common.utils import get_default_ray_temp_dir
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy

from recipe.partial_rollout.checkpoint.run_checkpoints import writable
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.config.settings import (
    OVERLONG,
    Correction,
    Mode,
    PartialRolloutConfig,
    Placement,
    TrustRegion,
    engine_devices,
    trainer_devices,
    verls_own,
    whole,
)
from recipe.partial_rollout.preflight.rule import (
    BATCH,
    CORRECTION,
    GPUS,
    LOSS,
    Rule,
    at,
    broken,
    budget,
    compares_siblings,
    copies,
    divided,
    divisible,
    keeps_on_policy_tokens,
    longest,
    one_of,
    only,
    replica_devices,
    where,
)
from recipe.partial_rollout.terminal import say
from recipe.partial_rollout.training.loss import ROUTER_REPLAY, WeightGranularity, weight_granularity
from recipe.partial_rollout.worker.llm_client import WHOLE
from verl_ext.guard import TESTED, installed_pair

_BACKEND, _FILTER = "rollout.checkpoint_engine.backend", "algorithm.filter_groups"
_TEMPORARY = 107 - len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""bytes of the path of Ray's temporary directory, so that its longest socket has a path that Linux takes"""
_DRAFTS = "rollout.engine_kwargs.vllm.speculative_config"
_SCORES_LATE = "a colocated reward model scores once the engines sleep"
_NEWER_ROUTES = "an engine that resumes a sample reports routes of newer weights than sampled its first tokens"
DUAL_CLIPS = "vanilla", "dppo_tv", "dppo_kl"
"""losses of verl that read ``clip_ratio_c``"""
NOT_UNDER_V1 = "remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"
"""estimators that read a greedy baseline, columns of the reward, or sums over the vocabulary"""
_PR, _NO_PR = "partial_rollout.enable=True", "partial_rollout.enable=False"
_SEPARATE, _COLOCATED = "partial_rollout.placement=separate", "partial_rollout.placement=colocated"
_UNCORRECTED, _CORRECTED = "partial_rollout.correction=none", "partial_rollout.correction=decoupled"
_V1, _REWARD_MODEL, _FILTERED = "trainer.use_v1=True", "reward.reward_model.enable=True", f"{_FILTER}.enable=True"
# The config may be of a run that lacked a key; the settings have its default.
_own = PartialRolloutConfig.from_config


_TRAINING = (
    one_of("model_engine", ("dp", None), "engine=fsdp2 or engine=megatron switches engines"),
    # how a batch is divided
    divisible(BATCH, "rollout.n", lambda c: copies(c, "actor"), "device(s)"),
    Rule(
        "data.gen_batch_size",
        lambda v, c: v in (None, at(c, BATCH)),
        lambda c: f"as {BATCH}={at(c, BATCH)}, or null",
    ),
    *divided("actor"),
    Rule(
        "rollout.log_prob_use_dynamic_bsz",
        lambda v, c: v == c.actor_rollout_ref.actor.use_dynamic_bsz,
        lambda c: f"as actor_rollout_ref.actor.use_dynamic_bsz={c.actor_rollout_ref.actor.use_dynamic_bsz}",
        "verl's worker asserts it",
    ),
    # micro-batches that are made by tokens: of the update, the log-probs, the reference
    *where("actor.use_dynamic_bsz=True", budget("actor.ppo_max_token_len_per_gpu", "actor")),
    *where("rollout.log_prob_use_dynamic_bsz=True", budget("rollout.log_prob_max_token_len_per_gpu", "actor")),
    *where(
        ("ref.log_prob_use_dynamic_bsz=True", need_reference_policy),
        budget("ref.log_prob_max_token_len_per_gpu", "ref"),
    ),
    *where(need_critic, *divided("critic"), budget("critic.ppo_max_token_len_per_gpu", "critic")),
    Rule(
        "rollout.response_length",
        lambda _, c: (most := at(c, "rollout.max_model_len")) is None or longest(c) <= most,
        lambda c: (
            f"with prompt_length={at(c, 'rollout.prompt_length')} it must fit "
            f"rollout.max_model_len={at(c, 'rollout.max_model_len')}"
        ),
    ),
    Rule(
        "rollout.prompt_length",
        lambda v, c: v >= c.data.max_prompt_length,
        lambda c: f"at least data.max_prompt_length={c.data.max_prompt_length}: longer prompts fail their samples",
    ),
    # of data/a[1]/x.parquet verl would read data/a1/x.parquet
    *(
        Rule(
            f"data.{split}_files",
            lambda v, _: not {*"*?[]"} & {*"".join([v] if isinstance(v, str) else v)},
            "paths without * ? [ ], which the reader of data files takes for a pattern",
        )
        for split in ("train", "val")
    ),
    *(
        only(f"{who}.use_shm", False, "verl takes a copy of the same size that it finds in /dev/shm for the file")
        for who in ("data", "model", "critic.model")
    ),
    Rule(
        "model.custom_chat_template",
        lambda v, _: v is None or "{" in v,
        "null, or the template itself, which is text in Jinja and no path",
    ),
    Rule(
        "trainer.nnodes",
        lambda v, c: v == 1 or os.environ.get("RAY_ADDRESS") or at(c, "ray_kwargs.ray_init.address"),
        "1 (NNODES=1), or a Ray cluster: `ray start --head` on one node, `ray start --address=HEAD:6379` on the others, "
        "then RAY_ADDRESS=auto",
    ),
    *where(
        lambda c: (at(c, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS") or "local") == "local",
        Rule(
            "ray_kwargs.ray_init._temp_dir",
            lambda v, _: len(os.fsencode(v or get_default_ray_temp_dir())) <= _TEMPORARY,
            lambda _: (
                f"at most {_TEMPORARY} bytes for Ray's sockets; null is {get_default_ray_temp_dir()}, "
                "by RAY_TMPDIR or TMPDIR"
            ),
        ),
    ),
    Rule(
        "data.seed",
        lambda v, c: (
            v is not None
            or not c.data.shuffle
            or all((c.data.get(f"{split}_max_samples") or -1) <= 0 for split in ("train", "val"))
        ),
        "an integer with data.shuffle and max_samples: verl draws other rows in each process",
    ),
    # what a run writes, and resumes from
    Rule("trainer.default_local_dir", lambda v, _: writable(v), "a directory that this user can write"),
    *where(
        "trainer.resume_mode=resume_path",
        Rule(
            "trainer.resume_from_path",
            lambda v, _: v and re.fullmatch(r"global_step_\d+", Path(str(v)).name) and Path(str(v)).is_dir(),
            "an existing .../global_step_K",
        ),
    ),
    only("trainer.default_hdfs_dir", None, "checkpoints are saved locally only"),
    only("trainer.remove_previous_ckpt_in_save", False, "trainer.max_actor_ckpt_to_keep=1 takes its place"),
    *(only(f"{who}.checkpoint.async_save", False, "it is sealed once the save returns") for who in ("actor", "critic")),
    Rule(
        "actor.checkpoint.save_contents",
        lambda v, _: "model" in v and {*v} <= {"model", "optimizer", "extra", "hf_model"},
        "a list of model, optimizer, extra, hf_model, with model: a resume would go on from the first weights",
    ),
)
_LEARNING = (
    # dynamic sampling
    *where(_NO_PR, only(f"{_FILTER}.enable", False, "verl's v0 trainer ignores it")),
    *where("rollout.n=1", only(f"{_FILTER}.enable", False, "a sample is equal to itself")),
    *where(
        _FILTERED,
        *where(_REWARD_MODEL, only("reward.reward_model.enable_resource_pool", True, _SCORES_LATE)),
        one_of(f"{_FILTER}.max_inflight_gen_batches", (1, None), "partial_rollout.overlap says how much is in flight"),
        Rule(
            f"{_FILTER}.max_num_gen_batches",
            lambda v, _: v != 1,
            "0 for no limit, or at least 2: with 1 nothing is replaced",
        ),
        Rule(
            f"{_FILTER}.metric",
            lambda v, _: v and isinstance(v, str),
            "reward, or a name of its extra information, such as acc",
        ),
        Rule(
            f"{_FILTER}.metric",
            lambda v, c: not (v == "seq_final_reward" and c.algorithm.use_kl_in_reward),
            "reward with use_kl_in_reward=True: its penalty is known in training only",
        ),
    ),
    # algorithm and loss
    one_of("algorithm.adv_estimator", ADV_ESTIMATOR_REGISTRY),
    *where("algorithm.adv_estimator=gae", one_of("critic.enable", (True, None), "it takes a critic's values")),
    *where(
        "algorithm.adv_estimator=gdpo",
        # verl ignores weights beyond the number of keys.
        Rule(
            "algorithm.gdpo_reward_weights",
            lambda v, c: v is None or len(v) == len(c.algorithm.gdpo_reward_keys),
            lambda c: f"null, or a number for each of algorithm.gdpo_reward_keys={c.algorithm.gdpo_reward_keys}",
        ),
    ),
    Rule(
        "rollout.n",
        lambda v, c: v >= 2 or not compares_siblings(c),
        lambda c: (
            f"at least 2 with algorithm.adv_estimator={c.algorithm.adv_estimator}, whose baseline is a prompt's other "
            "samples (1 is verl's default; the recipes have 8)"
        ),
    ),
    one_of(LOSS, POLICY_LOSS_REGISTRY),
    Rule(
        LOSS,
        lambda v, _: v != "geo_mean",
        "any other",
        "verl averages it in each micro-batch and adds these up: its gradient grows with their number",
    ),
    *where(
        lambda c: at(c, LOSS) in DUAL_CLIPS,
        Rule(
            "actor.clip_ratio_c",
            lambda v, c: (
                v > 1
                if v is not None
                else c.partial_rollout.enable
                and c.partial_rollout.correction != Correction.NONE
                and at(c, LOSS) == "vanilla"
            ),
            "a number above 1, or null for no dual clip with partial_rollout.correction and loss_mode=vanilla",
        ),
    ),
    *where(
        _V1,
        Rule(
            "algorithm.adv_estimator",
            lambda v, _: v not in NOT_UNDER_V1,
            "any other",
            "verl's v1 trainers do not give it what it computes with",
        ),
        # v0 pads every micro-batch to rollout.response_length.
        *(
            Rule(
                f"{part}.loss_scale_factor",
                lambda v, _: v and v > 0,
                lambda c: f"a number above 0, such as rollout.response_length={at(c, 'rollout.response_length')}",
                "null weighs a sample by the longest response of its micro-batch",
                (f"{part}.loss_agg_mode=seq-mean-token-sum-norm",),
            )
            for part in ("actor", "critic")
        ),
    ),
    *where(
        lambda c: c.actor_rollout_ref.actor.strategy != "megatron",
        Rule("actor.optim.clip_grad", lambda v, _: v and v > 0, "above 0: a gradient's largest norm"),
    ),
    # rewards
    *where(_REWARD_MODEL, only("partial_rollout.reward_in_worker", False)),
    *where(
        ("reward.reward_manager.name=dapo", f"{OVERLONG}.enable=True"),
        Rule(f"{OVERLONG}.penalty_factor", lambda v, _: v >= 0, "at least 0"),
        # Where the buffer has no length of its own, the recipe gives it a fifth of this.
        Rule("reward.reward_kwargs.max_resp_len", lambda v, _: v >= 1, "tokens: ${data.max_response_length}"),
    ),
)
_ENGINES = (
    *where(
        lambda c: not engine_devices(c),
        Rule(
            "rollout.tensor_model_parallel_size",
            lambda _, c: trainer_devices(c) % replica_devices(c) == 0,
            lambda c: f"whole replicas on {trainer_devices(c)} device(s); one has {replica_devices(c)}",
        ),
    ),
    *where("trainer.device=cpu", only(_DRAFTS, None, "vLLM's proposers change there what is sampled")),
    # The recipe has parts of its own there.
    Rule(
        "rollout.agent.agent_loop_manager_class",
        lambda v, _: v is None or v.startswith("recipe.partial_rollout."),
        "null: the recipe has its own; loops of yours go into agent_loop_config_path",
    ),
    only("rollout.checkpoint_manager_class", None, "the recipe has its own"),
    only("trainer.checkpoint_callback_class", None, "verl's v1 alone calls it, before a checkpoint is sealed"),
)
_PARTIAL_ROLLOUT = (
    # the recipe's keys, compared with each other
    *where(_NO_PR, only("partial_rollout.placement", "colocated")),
    Rule(
        "partial_rollout.overlap",
        lambda _, c: _own(c).overlap <= _own(c).max_staleness,
        lambda c: f"at most partial_rollout.max_staleness={_own(c).max_staleness}",
        "more groups in flight cannot all be trained in time",
    ),
    Rule(
        "partial_rollout.overlap",
        lambda _, c: (
            _own(c).overlap >= 0
            or (_own(c).mode is Mode.APRIL and whole((1 + _own(c).overlap) * c.data.train_batch_size) >= 1)
        ),
        "at least 0; with partial_rollout.mode=april (1 + overlap) * data.train_batch_size at least 1",
    ),
    *where(
        lambda c: _own(c).mode is not Mode.WINDOW,
        Rule("partial_rollout.max_staleness", lambda v, _: v >= 1, lambda c: f"at least 1 in mode {_own(c).mode}"),
    ),
    # The deadline of a call must pass before that of what the call is part of.
    Rule(
        "partial_rollout.failures.tool_timeout_s",
        lambda _, c: (_own(c).failures.tool_timeout_s or 0) <= (_own(c).failures.sample_timeout_s or inf),
        lambda c: f"at most partial_rollout.failures.sample_timeout_s={_own(c).failures.sample_timeout_s}",
        "that would end its sample first",
    ),
    Rule(
        "partial_rollout.tools.release_after_s",
        lambda _, c: min(_own(c).tools.release_after_s, _own(c).parked_s or inf) < _own(c).deadlines.stall_s,
        lambda c: f"below partial_rollout.deadlines.stall_s={_own(c).deadlines.stall_s:g}",
        "that would end the run during a call in its deadline",
    ),
    *where(
        (_V1, _NO_PR),
        only("rollout.enable_rollout_routing_replay", False, "rows under v1 have no routes"),
        only("distillation.enabled", False, "rows under v1 have nothing of a teacher"),
    ),
    *where(
        _V1,
        only("trainer.v1.sampler.custom_sampler.path", None, "the recipe's manager makes the batches"),
        only("trainer.v1.sampler.max_off_policy_threshold", 8, "partial_rollout.max_staleness is the bound"),
        only("trainer.v1.sampler.max_off_policy_strategy", "drop", "nothing is dropped, a round waits"),
        only("trainer.v1.sampler.sync_refill_failed_groups", False, "a failed sample is retried, then masked"),
        only("skip.rollout_tq.enable", False, "batches do not come from verl's rollout"),
    ),
    *where(
        _PR,
        only("skip.rollout.enable", False, "batches do not come from verl's rollout"),
        only("rollout.name", "vllm", "other engines are not interrupted by it"),
        only("rollout.calculate_log_probs", True, "samples span versions: the engine's own log-probs are needed"),
        only("rollout.logprobs_mode", "processed_logprobs", "others are not log-probs of what was sampled"),
        only("rollout.enable_rollout_routing_replay", False, _NEWER_ROUTES),
        one_of(ROUTER_REPLAY, ("disabled", "R2", None), _NEWER_ROUTES),
        only("rollout.disaggregation.enabled", False, "a resumed sample is prefilled on the replica that decodes it"),
        only("rollout.full_determinism", False, "every request is seeded alike: a resumed sample would draw old noise"),
        *where(
            "partial_rollout.resume_kv=keep",
            only("rollout.enable_prefix_caching", True, "the kept KV cache is found by its prefix"),
            only("rollout.free_cache_engine", False, "an engine that sleeps gives its KV cache up"),
        ),
        only("distillation.enabled", False, "its loss has no correction"),
        Rule(
            "algorithm.adv_estimator",
            lambda v, _: v != "remax",
            "any other",
            "its greedy baseline is synchronous",
        ),
        Rule(
            CORRECTION,
            lambda v, _: v is not None,
            "verl's node of that name",
            "partial_rollout.correction=none switches the correction off",
        ),
        only(
            f"{CORRECTION}.bypass_mode",
            False,
            "verl changes the driver's loss once the workers have theirs, so loss_type, rollout_is and rollout_rs never "
            "act; partial_rollout.trust_region=mask bounds the ratio to the behaviour policy",
        ),
    ),
    *where(
        (_UNCORRECTED, _PR),
        one_of("partial_rollout.trust_region", (TrustRegion.AUTO, TrustRegion.NONE)),
        one_of(f"{CORRECTION}.rollout_is", (None,)),
    ),
    *where(
        (_CORRECTED, _PR),
        *(
            one_of(
                f"rollout.{key}",
                WHOLE[key],
                "the engine's log-probs would be of the tokens that are kept, the trainer's of all",
            )
            for key in ("top_p", "top_k")
        ),
        Rule(
            "rollout.temperature",
            lambda v, _: v >= 0.01,
            "at least 0.01",
            "vLLM raises a smaller one to 0.01, and 0 is greedy",
        ),
        one_of(f"{CORRECTION}.rollout_is", (None, *WeightGranularity)),
        *where(
            lambda c: weight_granularity(at(c, LOSS)) is not WeightGranularity.TOKEN,
            one_of(
                f"{CORRECTION}.rollout_is",
                (None, WeightGranularity.GEOMETRIC, WeightGranularity.SEQUENCE),
                "the loss has one ratio for a sequence",
            ),
        ),
        Rule(
            f"{CORRECTION}.rollout_is_threshold",
            lambda v, _: keeps_on_policy_tokens(v),
            "a number above 0 (caps the weights), or lower_upper around 1 (masks tokens outside)",
        ),
    ),
    # where the engines run
    *where(_COLOCATED, only(_BACKEND, "naive", "trainer and engines share their devices")),
    Rule(
        "partial_rollout.placement",
        lambda v, _: v != Placement.SEPARATE or installed_pair().vllm in [pair.vllm for pair in TESTED],
        lambda _: f"colocated with vLLM {installed_pair().vllm}: only the pinned set's engines have been held",
    ),
    *where(
        _SEPARATE,
        only("rollout.free_cache_engine", False, "the engines never sleep"),
        *where(_REWARD_MODEL, only("reward.reward_model.enable_resource_pool", True, _SCORES_LATE)),
        *(
            Rule(f"rollout.{key}", lambda v, _: v >= 1, "at least 1", "the engines' devices")
            for key in ("nnodes", "n_gpus_per_node")
        ),
        Rule(
            "rollout.n_gpus_per_node",
            lambda v, c: (
                at(c, "rollout.nnodes") * v % (size := replica_devices(c)) == 0 and max(size, v) % min(size, v) == 0
            ),
            lambda c: (
                f"with rollout.nnodes={at(c, 'rollout.nnodes')} it must make whole replicas of {replica_devices(c)} "
                "devices each"
            ),
        ),
        divisible(GPUS, "trainer.nnodes", replica_devices, "devices of a replica", "verl's workers assert it"),
        Rule(_BACKEND, lambda v, _: v != "naive", "shm (one node) or nccl (GPUs)", "naive needs shared devices"),
        Rule(
            "model.lora.merge",
            lambda v, c: v or not (at(c, "model.lora_rank") or at(c, "model.lora.rank")),
            "True",
            "whole weights are transferred, no adapters",
        ),
    ),
    *where(
        (_SEPARATE, lambda c: not need_critic(c)),
        only("trainer.critic_warmup", 0, "its steps would begin versions, and without a critic they update nothing"),
    ),
    *where(
        (f"{_BACKEND}=shm", _SEPARATE),
        *(
            only(key, 1, "other nodes do not see its file; nccl crosses nodes")
            for key in ("trainer.nnodes", "rollout.nnodes")
        ),
    ),
)
WARNINGS = (
    *where(
        _PR,
        only(
            "partial_rollout.correction",
            Correction.DECOUPLED,
            "samples that span policy versions train without behaviour weights",
        ),
    ),
    *where(
        _SEPARATE,
        Rule(
            "partial_rollout.overlap",
            lambda v, _: v >= 1,
            "at least 1",
            "fewer than N groups are in flight while the trainer holds N, so it waits for them",
        ),
    ),
)
"""rules of runs that start all the same"""


def check_rules(config: DictConfig) -> Iterator[ConfigError]:
    """Yield an error for each rule that ``config`` breaks; print warnings."""
    for warning in broken(WARNINGS, config):
        say(f"warning: {warning}", error=True)
    # A v1 trainer of verl's own has its own rollout.
    ours = () if verls_own(config) else (*_ENGINES, *_PARTIAL_ROLLOUT)
    return broken((*_TRAINING, *_LEARNING, *ours), config)
