"""Relations between keys, and what partial rollout needs of verl's: a rule a row. They do not depend on their order.

verl's own keys are verl's to check, unless a wrong value would silently train something else, or everybody meets it in the
first hour. verl's rollout correction is off by default, and several settings make verl ignore it without a warning: rules
here refuse them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.utils import need_critic

from recipe.partial_rollout.checkpoint.run_checkpoints import writable
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.config.settings import (
    OVERLONG,
    Correction,
    Placement,
    ResumeKV,
    TrustRegion,
    engine_devices,
    trainer_devices,
)
from recipe.partial_rollout.preflight import facts
from recipe.partial_rollout.preflight.facts import at
from recipe.partial_rollout.preflight.rule import (
    Rule,
    When,
    broken,
    budget,
    divided,
    divisible,
    least,
    on,
    one_of,
    only,
    or_null,
    other_than,
    passes,
    same,
    where,
)
from verl_ext.guard import TESTED, installed_pair

_BATCH, _GPUS, _BACKEND = "data.train_batch_size", "trainer.n_gpus_per_node", "rollout.checkpoint_engine.backend"
_FILTER, _CORRECTION, _LOSS = "algorithm.filter_groups", "algorithm.rollout_correction", "actor.policy_loss.loss_mode"
_LONGEST_RESPONSE = "reward.reward_kwargs.max_resp_len"
_DRAFTS = "rollout.engine_kwargs.vllm.speculative_config"
_DRAFTS_KILL = "0.24.0"
"""the vLLM whose asynchronous scheduler loses count of draft tokens when it preempts"""
_ROUTES = "routes are not kept over interruptions"
DUAL_CLIPS = "vanilla", "dppo_tv", "dppo_kl"
"""losses of verl that read ``clip_ratio_c``"""
_PR, _NO_PR = on("partial_rollout.enable"), on("partial_rollout.enable", False)
_SEPARATE = on("partial_rollout.placement", Placement.SEPARATE)
_COLOCATED = on("partial_rollout.placement", Placement.COLOCATED, _PR)._replace(words=_PR.words)
_V1 = on("trainer.use_v1")
_UNCORRECTED = on("partial_rollout.correction", Correction.NONE, _PR)
_CORRECTED = When(lambda c: _PR.applies(c) and not _UNCORRECTED.applies(c))
_CRITIC = When(need_critic)
_FILTERED = When(lambda c: at(c, f"{_FILTER}.enable"))
_FSDP = When(lambda c: at(c, "actor.strategy") != "megatron")


_TRAINING = (
    one_of("model_engine", ("dp", None), "engine=fsdp2 or engine=megatron switches engines"),
    # how a batch is divided
    divisible(_BATCH, "rollout.n", facts.parts, "device(s)"),
    or_null(same("data.gen_batch_size", _BATCH)),
    *divided("actor"),
    same("rollout.log_prob_use_dynamic_bsz", "actor.use_dynamic_bsz", "verl's worker asserts it"),
    *passes(),
    *where(_CRITIC, *divided("critic"), budget("critic.ppo_max_token_len_per_gpu", "critic")),
    Rule(
        "rollout.response_length",
        lambda _, c: (most := at(c, "rollout.max_model_len")) is None or facts.longest(c) <= most,
        "with prompt_length={rollout.prompt_length} it must fit rollout.max_model_len={rollout.max_model_len}",
    ),
    Rule(
        "rollout.prompt_length",
        lambda v, c: v >= at(c, "data.max_prompt_length"),
        "at least data.max_prompt_length={data.max_prompt_length}: longer prompts would be cut",
    ),
    # what a run writes, and resumes from
    Rule("trainer.default_local_dir", lambda v, _: writable(v), "a directory that this user can write"),
    *where(
        on("trainer.resume_mode", "resume_path"),
        Rule(
            "trainer.resume_from_path",
            lambda v, _: v and re.fullmatch(r"global_step_\d+", Path(str(v)).name) and Path(str(v)).is_dir(),
            "an existing .../global_step_K",
        ),
    ),
    only("trainer.default_hdfs_dir", None, "checkpoints are saved locally only"),
    only("trainer.checkpoint_callback_class", None, "verl's v1 alone calls it, before a checkpoint is sealed"),
    *(only(f"{who}.checkpoint.async_save", False, "a checkpoint is sealed once whole") for who in ("actor", "critic")),
    Rule(
        "actor.checkpoint.save_contents",
        lambda v, _: "model" in v and {*v} <= {"model", "optimizer", "extra", "hf_model"},
        "a list of model, optimizer, extra, hf_model, with model: a resume would go on from the first weights",
    ),
)
_LEARNING = (
    # dynamic sampling
    *where(_NO_PR, only(f"{_FILTER}.enable", False, "verl's v0 trainer ignores it")),
    *where(on("rollout.n", 1), only(f"{_FILTER}.enable", False, "a sample is equal to itself")),
    *where(
        _FILTERED,
        Rule(
            f"{_FILTER}.enable",
            lambda _, c: facts.scores_early(c),
            "False, or reward.reward_model.enable_resource_pool=True: colocated it scores too late",
        ),
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
    *where(on("algorithm.adv_estimator", "gae"), other_than("critic.enable", False, "it takes a critic's values")),
    *where(
        on("algorithm.adv_estimator", "gdpo"),
        # verl ignores weights beyond the number of keys.
        Rule(
            "algorithm.gdpo_reward_weights",
            lambda v, c: v is None or len(v) == len(at(c, "algorithm.gdpo_reward_keys")),
            "null, or a number for each of algorithm.gdpo_reward_keys={algorithm.gdpo_reward_keys}",
        ),
    ),
    Rule(
        "rollout.n",
        lambda v, c: v >= 2 or not facts.compares_siblings(c),
        "at least 2 with algorithm.adv_estimator={algorithm.adv_estimator}, whose baseline is a prompt's other samples "
        "(1 is verl's default; the recipes have 8)",
    ),
    one_of(_LOSS, POLICY_LOSS_REGISTRY),
    other_than(
        _LOSS,
        "geo_mean",
        "verl averages it in each micro-batch and adds these up: its gradient grows with their number",
    ),
    Rule(
        "actor.clip_ratio_c",
        lambda v, c: v > 1 if v is not None else _CORRECTED.applies(c) and at(c, _LOSS) == "vanilla",
        "a number above 1, or null for no dual clip with partial_rollout.correction and loss_mode=vanilla",
        when=When(lambda c: at(c, _LOSS) in DUAL_CLIPS),
    ),
    *where(_FSDP, Rule("actor.optim.clip_grad", lambda v, _: v and v > 0, "above 0: a gradient's largest norm")),
    # rewards
    *where(on("reward.reward_model.enable"), only("partial_rollout.reward_in_worker", False)),
    *where(
        When(facts.penalises_length),
        least(f"{OVERLONG}.penalty_factor", 0),
        Rule(_LONGEST_RESPONSE, lambda v, _: isinstance(v, int) and v >= 1, "tokens: ${data.max_response_length}"),
        Rule(
            f"{OVERLONG}.len",
            lambda v, c: v is None or 0 < v <= at(c, _LONGEST_RESPONSE),
            f"1 to {_LONGEST_RESPONSE}={{{_LONGEST_RESPONSE}}}, or null for a fifth of it",
        ),
    ),
)
_ENGINES = (
    Rule(
        "rollout.tensor_model_parallel_size",
        lambda _, c: trainer_devices(c) % facts.replica_devices(c) == 0,
        "whole replicas on {trainer_devices} device(s); one has {replica_devices}",
        when=When(lambda c: not engine_devices(c)),
    ),
    Rule(
        "rollout.agent.num_workers",
        lambda v, c: facts.dealt_out(c) % v == 0,
        "a divisor of {dealt_out}, the samples of a step,",
        "verl's manager gives each worker as many",
        when=_NO_PR,
    ),
    Rule(
        f"{_DRAFTS}.method",
        lambda v, _: installed_pair().vllm != _DRAFTS_KILL or not re.match("eagle|.*mtp", str(v)),
        f"null or ngram with vLLM {_DRAFTS_KILL}, whose engine can die with it when it preempts (vllm#48245)",
    ),
    *where(on("trainer.device", "cpu"), only(_DRAFTS, None, "vLLM's proposers change there what is sampled")),
    # The recipe has parts of its own there.
    Rule(
        "rollout.agent.agent_loop_manager_class",
        lambda v, _: v is None or v.startswith("recipe.partial_rollout."),
        "null: the recipe has its own; loops of yours go into agent_loop_config_path",
    ),
    only("rollout.checkpoint_manager_class", None, "the recipe has its own"),
)
_PARTIAL_ROLLOUT = (
    *where(
        on("trainer.use_v1", True, _NO_PR),
        only("rollout.enable_rollout_routing_replay", False, "rows under v1 have no routes"),
        only("distillation.enabled", False, "rows under v1 have nothing of a teacher"),
        other_than("algorithm.adv_estimator", "remax", "verl's v1 makes no greedy baseline"),
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
        only("rollout.enable_rollout_routing_replay", False, "an interrupted sample loses the routes of its tokens"),
        only("rollout.disaggregation.enabled", False, "an interrupted sample is prefilled again where it is decoded"),
        only("rollout.full_determinism", False, "every request is seeded alike: a resumed sample would draw old noise"),
        one_of("actor.megatron.router_replay.mode", ("disabled", None), _ROUTES),
        one_of("actor.veomni.router_replay.mode", ("disabled", None), _ROUTES),
        Rule(
            "partial_rollout.resume_kv",
            lambda v, c: v != ResumeKV.KEEP or facts.keeps_kv(c),
            "recompute, or rollout.enable_prefix_caching=True and free_cache_engine=False",
            "an engine that sleeps gives its KV cache up, and the recipe does not use vLLM's KV offloading",
        ),
        Rule(
            "partial_rollout.slots_per_replica",
            lambda v, c: v is None or v <= facts.most_calls(c),
            "at most {most_calls}, which verl's server takes at once (more with a larger rollout.max_num_seqs)",
        ),
        only("distillation.enabled", False, "its loss has no correction"),
        other_than("algorithm.adv_estimator", "remax", "its greedy baseline needs the synchronous rollout"),
        Rule(
            _CORRECTION,
            lambda v, _: v is not None,
            "verl's node of that name",
            "partial_rollout.correction=none switches the correction off",
        ),
        only(
            f"{_CORRECTION}.bypass_mode",
            False,
            "verl changes the driver's loss once the workers have theirs, so loss_type, rollout_is and rollout_rs never "
            "act; partial_rollout.trust_region=mask bounds the ratio to the behaviour policy",
        ),
    ),
    *where(
        _UNCORRECTED,
        one_of("partial_rollout.trust_region", (TrustRegion.AUTO, TrustRegion.NONE)),
        one_of(f"{_CORRECTION}.rollout_is", (None,)),
    ),
    *where(
        _CORRECTED,
        Rule(
            f"{_CORRECTION}.rollout_is",
            lambda v, c: v is None or v in facts.levels(c),
            f"one of {{levels}}, or null for {{fitting_level}}, with loss_mode={{{_LOSS}}}",
        ),
        Rule(
            f"{_CORRECTION}.rollout_is_threshold",
            facts.keeps_on_policy_tokens,
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
        Rule(
            "reward.reward_model.enable_resource_pool",
            lambda _, c: facts.scores_early(c),
            "True",
            "a colocated reward model scores when the engines sleep, and they never do",
        ),
        *(least(f"rollout.{key}", 1, "the engines' devices") for key in ("nnodes", "n_gpus_per_node")),
        Rule(
            "rollout.n_gpus_per_node",
            facts.makes_whole_replicas,
            "with rollout.nnodes={rollout.nnodes} it must make whole replicas of {replica_devices} devices each",
        ),
        divisible(_GPUS, "trainer.nnodes", facts.replica_devices, "devices of a replica", "verl's workers assert it"),
        Rule(_BACKEND, lambda v, _: v != "naive", "shm (one node) or nccl (GPUs)", "naive needs shared devices"),
        Rule(
            "model.lora.merge",
            lambda v, c: v or not facts.trains_adapters(c),
            "True",
            "whole weights are transferred, no adapters",
        ),
    ),
    # Its steps would begin a version without an update of anything, and so without an end of their batch.
    *where(
        When(lambda c: _SEPARATE.applies(c) and not need_critic(c), f"{_SEPARATE.words} and no critic"),
        only("trainer.critic_warmup", 0),
    ),
    *where(
        on(_BACKEND, "shm", _SEPARATE),
        *(
            only(key, 1, "other nodes do not see its file; nccl crosses nodes")
            for key in ("trainer.nnodes", "rollout.nnodes")
        ),
    ),
)
RULES = (*_TRAINING, *_LEARNING, *_ENGINES, *_PARTIAL_ROLLOUT)
WARNINGS = (
    only(
        "data.filter_overlong_prompts",
        True,
        "verl cuts prompts of more than data.max_prompt_length tokens from the left, in the middle of a run",
    ),
    *where(
        _PR,
        other_than(
            "partial_rollout.correction",
            Correction.NONE,
            "samples that span policy versions train without behaviour weights",
        ),
    ),
    *where(
        _SEPARATE,
        least(
            "partial_rollout.overlap",
            1,
            "fewer than N groups are in flight while the trainer holds N, so it waits for them",
        ),
    ),
    *where(
        When(lambda c: _PR.applies(c) and c.trainer.save_freq <= 0, "with trainer.save_freq=-1"),
        only("partial_rollout.drain", True, "no checkpoint keeps what is in flight at the end"),
    ),
)
"""rules of runs that start all the same"""


def check_rules(config: DictConfig) -> Iterator[ConfigError]:
    """Yield an error for each rule that ``config`` breaks; print warnings."""
    for warning in broken(WARNINGS, config):
        print(f"warning: {warning}", file=sys.stderr)
    return broken(RULES, config)
