"""What verl's trainer and partial rollout need of the configuration: a rule a row.

verl finds out about these in a worker, a minute after the start, or not at all. Its rollout correction is off by default,
and several settings make it ignore the correction without a warning: nothing trains uncorrected without being told. Rules
do not depend on their order: the first that is broken is told.
"""

from __future__ import annotations

import re
from pathlib import Path

from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.utils import need_critic
from verl.utils.tracking import Tracking
from verl.workers.config import CriticConfig

from recipe.partial_rollout.config.settings import (
    OVERLONG,
    V1_MODE,
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
    budget,
    directory,
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
_KL = [name + end for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for end in ("", "+")]
_PROJECT = r"[\w+.-]{1,100}"
_DTYPE_KEYS = ("model_dtype", "dtype", *(f"mixed_precision.{part}_dtype" for part in ("param", "reduce", "buffer")))
_ATTENTION = "override_config.attn_implementation"
DUAL_CLIPS = "vanilla", "dppo_tv", "dppo_kl"
"""losses of verl that read ``clip_ratio_c``"""
_MEANS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

_PR, _NO_PR = on("partial_rollout.enable"), on("partial_rollout.enable", False)
_SEPARATE = on("partial_rollout.placement", Placement.SEPARATE)
_COLOCATED = _PR.but(_SEPARATE)
_V1 = on("trainer.use_v1")
_UNCORRECTED = _PR.also(on("partial_rollout.correction", Correction.NONE))
_CRITIC = When(need_critic)
_CPU = on("trainer.device", "cpu")


_TRAINING = (
    Rule(
        "trainer.v1.trainer_mode",
        lambda v, c: not c.trainer.use_v1 or v == V1_MODE,
        f"{V1_MODE} with trainer.use_v1=True; verl's own modes are arms of bash run_scripts/recipe.sh",
    ),
    one_of("model_engine", ("dp", None), "engine=fsdp2 or engine=megatron switches engines"),
    *(least(key, 1) for key in ("trainer.total_epochs", _BATCH, "rollout.n", _GPUS, "trainer.nnodes")),
    *(least(f"rollout.{part}_length", 1) for part in ("prompt", "response")),
    *(least(f"rollout.{way}_parallel_size", 1) for way in ("tensor_model", "data", "pipeline_model")),
    *(or_null(least(key, 1)) for key in ("trainer.total_training_steps", "data.val_batch_size")),
    or_null(least("data.dataloader_num_workers", 0)),
    *(
        or_null(Rule(key, lambda v, _: 0 <= v < 2**32, "at least 0, below 2**32, as numpy takes it"))
        for key in ("data.seed", "rollout.seed")
    ),
    *(
        Rule(key, lambda v, _: v and not isinstance(v, int), "a parquet file, or a list of them")
        for key in ("data.train_files", "data.val_files")
    ),
    divisible(_BATCH, "rollout.n", facts.parts, "device(s)"),
    or_null(same("data.gen_batch_size", _BATCH)),
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
    # how a batch is divided
    *divided("actor"),
    same("rollout.log_prob_use_dynamic_bsz", "actor.use_dynamic_bsz", "verl's worker asserts it"),
    *passes(),
    *where(
        _CRITIC,
        *divided("critic"),
        # Values are always computed by tokens.
        budget("critic.ppo_max_token_len_per_gpu", "critic"),
        budget(
            "critic.ppo_infer_max_token_len_per_gpu", "critic", default=CriticConfig.ppo_infer_max_token_len_per_gpu
        ),
        Rule(
            "critic.ppo_micro_batch_size_per_gpu",
            lambda v, c: c.critic.use_dynamic_bsz or (v and v > 0),
            "at least 1, or critic.use_dynamic_bsz=True",
        ),
        same(
            "critic.forward_max_token_len_per_gpu",
            "critic.ppo_max_token_len_per_gpu",
            "verl reads critic.ppo_infer_max_token_len_per_gpu instead",
        ),
    ),
    # what a run writes
    Rule(
        "trainer.project_name",
        lambda v, c: "swanlab" not in facts.loggers(c.trainer.logger) or re.fullmatch(_PROJECT, str(v), re.ASCII),
        "up to 100 letters, digits and _ + - ., as swanlab takes it",
    ),
    Rule(
        "trainer.logger",
        lambda v, _: v is not None and {*facts.loggers(v)} <= {*Tracking.supported_backend, "tracking"},
        "a list of " + ", ".join(Tracking.supported_backend),
    ),
    one_of("trainer.resume_mode", ("auto", "disable", "resume_path")),
    *where(
        on("trainer.resume_mode", "resume_path"),
        Rule(
            "trainer.resume_from_path",
            lambda v, _: v and re.fullmatch(r"global_step_\d+", Path(str(v)).name) and Path(str(v)).is_dir(),
            "an existing .../global_step_K",
        ),
    ),
    one_of("global_profiler.tool", ("nsys", "npu", "torch", "torch_memory", "precision_debugger", None)),
    only("trainer.default_hdfs_dir", None, "checkpoints are saved locally only"),
    only("trainer.checkpoint_callback_class", None, "verl's v1 alone calls it, before a checkpoint is sealed"),
    *(only(f"{who}.checkpoint.async_save", False, "a checkpoint is sealed once whole") for who in ("actor", "critic")),
    Rule(
        "actor.checkpoint.save_contents",
        lambda v, _: "model" in v and {*v} <= {"model", "optimizer", "extra", "hf_model"},
        "a list of model, optimizer, extra, hf_model, with model: a resume would go on from the first weights",
    ),
    directory("trainer.default_local_dir"),
    *(or_null(directory(f"trainer.{key}_data_dir")) for key in ("rollout", "validation")),
    *(
        Rule(f"trainer.{key}", lambda v, _: v and isinstance(v, str), "text (a number in quotes that reach hydra)")
        for key in ("project_name", "experiment_name")
    ),
)
_LEARNING = (
    # dynamic sampling
    *where(_NO_PR, only(f"{_FILTER}.enable", False, "verl's v0 trainer ignores it")),
    *where(on("rollout.n", 1), only(f"{_FILTER}.enable", False, "a sample is equal to itself")),
    *where(
        When(lambda c: at(c, f"{_FILTER}.enable")),
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
        Rule(
            "algorithm.gdpo_reward_keys",
            lambda v, _: v and OmegaConf.is_list(v),
            "a list of names that the reward function says numbers by",
        ),
        Rule(
            "algorithm.gdpo_reward_weights",
            lambda v, c: v is None or (OmegaConf.is_list(v) and len(v) == len(at(c, "algorithm.gdpo_reward_keys"))),
            "null, or a number for each of algorithm.gdpo_reward_keys={algorithm.gdpo_reward_keys}",
        ),
    ),
    *where(
        When(lambda c: str(at(c, "algorithm.adv_estimator")).endswith("optimal_token_baseline"), "with this estimator"),
        only("actor.calculate_sum_pi_squared", True, "it reads what the pass over the batch then gives"),
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
        lambda v, c: v > 1 if v is not None else facts.clips_once(c),
        lambda c: (
            "a number above 1"
            + (", or null for no dual clip" if facts.clips_once(c) else f" with loss_mode={at(c, _LOSS)}")
        ),
        when=When(lambda c: at(c, _LOSS) in DUAL_CLIPS),
    ),
    *where(on("actor.use_kl_loss"), one_of("actor.kl_loss_type", _KL)),
    *where(
        on("algorithm.use_kl_in_reward"),
        one_of("algorithm.kl_penalty", _KL),
        one_of("algorithm.kl_ctrl.type", ("fixed", "adaptive")),
    ),
    *where(
        on("algorithm.use_kl_in_reward").also(on("algorithm.kl_ctrl.type", "adaptive")),
        least("algorithm.kl_ctrl.horizon", 1),
        Rule("algorithm.kl_ctrl.target_kl", lambda v, _: v > 0, "above 0"),
    ),
    one_of("actor.loss_agg_mode", _MEANS),
    Rule(
        f"{_CORRECTION}.rollout_rs",
        lambda v, c: v is None or facts.rejects(v, c),
        "null, or modes such as token_k1 or seq_mean_k3 with a rollout_rs_threshold that fits them",
    ),
    least("actor.ppo_epochs", 1),
    least("actor.optim.lr", 0),
    *(or_null(least(f"actor.clip_ratio{end}", 0)) for end in ("", "_low", "_high")),
    *(Rule(f"algorithm.{key}", lambda v, _: 0 <= v <= 1, "0 to 1") for key in ("gamma", "lam")),
    *where(
        When(facts.trains_adapters, "with LoRA"),
        *(or_null(Rule(f"model.{key}", lambda v, _: v > 0, "above 0")) for key in ("lora_alpha", "lora.alpha")),
    ),
    one_of("actor.strategy", ("fsdp", "fsdp2", "megatron"), "engine=fsdp2, engine=megatron"),
    one_of("trainer.device", ("cpu", "cuda", "npu")),
    *where(
        When(lambda c: at(c, "actor.strategy") != "megatron"),
        Rule("actor.optim.clip_grad", lambda v, _: v and v > 0, "above 0: a gradient's largest norm"),
        one_of("actor.optim.lr_scheduler_type", ("constant", "cosine")),
        *(
            or_null(Rule(f"actor.fsdp_config.{key}", lambda v, c: str(v) in facts.dtypes(c), "one of {dtypes}"))
            for key in _DTYPE_KEYS
        ),
        *(Rule(f"{who}.{_ATTENTION}", facts.is_attention, "one of {attentions}") for who in ("model", "critic.model")),
    ),
    # rewards
    *where(on("reward.reward_model.enable"), only("partial_rollout.reward_in_worker", False)),
    *where(When(facts.may_penalise_length), one_of(f"{OVERLONG}.enable", (True, False))),
    *where(
        When(facts.penalises_length),
        least(f"{OVERLONG}.penalty_factor", 0),
        one_of(f"{OVERLONG}.log", (True, False)),
        Rule(_LONGEST_RESPONSE, lambda v, _: isinstance(v, int) and v >= 1, "tokens: ${data.max_response_length}"),
        Rule(
            f"{OVERLONG}.len",
            lambda v, c: v is None or 0 < v <= at(c, _LONGEST_RESPONSE),
            f"1 to {_LONGEST_RESPONSE}={{{_LONGEST_RESPONSE}}}, or null for a fifth of it",
        ),
    ),
)
_ENGINES = (
    only("rollout.mode", "async", "verl has no other"),
    Rule(
        "rollout.tensor_model_parallel_size",
        lambda _, c: trainer_devices(c) % facts.replica_devices(c) == 0,
        "whole replicas on {trainer_devices} device(s); one has {replica_devices}",
        when=When(lambda c: not engine_devices(c)),
    ),
    Rule("rollout.temperature", lambda v, _: v > 0, "above 0: log-probs are taken at it"),
    least("rollout.val_kwargs.temperature", 0),
    *(
        Rule(f"{node}.top_k", lambda v, _: v == -1 or v >= 1, "-1 for all tokens, or at least 1")
        for node in ("rollout", "rollout.val_kwargs")
    ),
    *(
        Rule(f"rollout.{key}", lambda v, _: 0 < v <= 1, "above 0, at most 1")
        for key in ("top_p", "val_kwargs.top_p", "gpu_memory_utilization")
    ),
    *(least(f"rollout.{key}", 1) for key in ("val_kwargs.n", "max_num_seqs", "max_num_batched_tokens")),
    *(least(key, 1) for key in ("rollout.agent.num_workers", "reward.num_workers")),
    Rule(
        "rollout.agent.num_workers",
        lambda v, c: facts.dealt_out(c) % v == 0,
        "a divisor of {dealt_out}, the samples of a step,",
        "verl's manager gives each worker as many",
        when=_NO_PR,
    ),
    one_of("rollout.scheduling_policy", ("fcfs", "priority")),
    one_of("rollout.dtype", ("auto", "half", "float16", "bfloat16", "float", "float32")),
    *where(
        on("rollout.name", "vllm"),
        one_of("rollout.quantization", ("fp8", "torchao", "ascend", None)),
        Rule(
            "rollout.load_format",
            lambda v, c: v == "dummy" or v.lower() in facts.load_formats(c),
            "one of {load_formats}",
        ),
    ),
    Rule(
        f"{_DRAFTS}.method",
        lambda v, _: installed_pair().vllm != _DRAFTS_KILL or not re.match("eagle|.*mtp", str(v)),
        f"null or ngram with vLLM {_DRAFTS_KILL}, whose engine can die with it when it preempts (vllm#48245)",
    ),
    *where(_CPU, only(_DRAFTS, None, "vLLM's proposers change there what is sampled")),
    # the recipe has parts of its own there
    Rule(
        "rollout.agent.agent_loop_manager_class",
        lambda v, _: v is None or v.startswith("recipe.partial_rollout."),
        "null: the recipe has its own; loops of yours go into agent_loop_config_path",
    ),
    only("rollout.checkpoint_manager_class", None, "the recipe has its own"),
)
_PARTIAL_ROLLOUT = (
    *where(
        _NO_PR.also(_V1),
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
        _PR.but(_UNCORRECTED)._replace(words=""),
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
    *where(_SEPARATE.but(_CRITIC, " and no critic"), only("trainer.critic_warmup", 0)),
    *where(
        _SEPARATE.also(on(_BACKEND, "shm")),
        *(
            only(key, 1, "other nodes do not see its file; nccl crosses nodes")
            for key in ("trainer.nnodes", "rollout.nnodes")
        ),
    ),
)
RULES = (*_TRAINING, *_LEARNING, *_ENGINES, *_PARTIAL_ROLLOUT)
