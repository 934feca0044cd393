"""Rules on the keys that engines and partial rollout depend on, one a row; their order does not matter.

verl's own keys are verl's to check, unless a wrong value would silently train something else, or everybody meets it in
the first hour. verl's rollout correction is off by default, and several settings make verl ignore it without a warning:
rules here refuse them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from math import inf

from omegaconf import DictConfig
from verl.workers.config import RolloutConfig

from recipe.partial_rollout.config import releases
from recipe.partial_rollout.config.keys import ConfigError, leaves
from recipe.partial_rollout.config.settings import (
    Correction,
    Mode,
    PartialRolloutConfig,
    TrustRegion,
    engine_devices,
    lora_rank,
    trainer_devices,
    verls_own,
    whole,
)
from recipe.partial_rollout.preflight.inputs import NOISE
from recipe.partial_rollout.preflight.learning_rules import LEARNING, TRAINING
from recipe.partial_rollout.preflight.rule import (
    BATCH,
    CORRECTION,
    GPUS,
    LOSS,
    NO_PR,
    REWARD_MODEL,
    SCORES_LATE,
    V1,
    Rule,
    at,
    broken,
    divisible,
    full,
    one_of,
    only,
    replica_devices,
    where,
)
from recipe.partial_rollout.terminal import say
from recipe.partial_rollout.training.loss import (
    DIVERGENCE_LOSSES,
    ROUTER_REPLAY,
    BehaviourRegion,
    WeightGranularity,
    weight_granularity,
)
from recipe.partial_rollout.worker.llm_client import WHOLE

_BOUNDS = "partial_rollout.trust_region_bounds"
_BACKEND = "rollout.checkpoint_engine.backend"
_TESTED = f"is tested only with vLLM {', '.join(releases.TESTED)}"
_VLLM = "rollout.engine_kwargs.vllm"


def _spelt(name: str) -> tuple[str, str]:
    """Keys of vLLM's argument ``name``, with underscores and with dashes: vLLM takes both."""
    return f"{_VLLM}.{name}", f"{_VLLM}.{name.replace('_', '-')}"


_DRAFTS = _spelt("speculative_config")
_OF_ROLLOUT = {field.name: field.name for field in fields(RolloutConfig)} | {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "enable_expert_parallel": "expert_parallel_size",
}
"""by vLLM's name of an argument, the key of ``rollout`` from which verl sets it"""
_OVERRIDE = "model.override_config"
_TRAINERS_OWN = re.compile(
    r"attn_implementation|use_cache|output_\w+|router_\w+_coef|aux_loss_alpha|initializer_range|classifier_dropout"
    r"|max_position_embeddings|(pad|bos)_token_id"
)
"""finds keys of a model's config that do not change the distribution of its tokens"""
_NEWER_ROUTES = (
    "the engine reports routes of its newest weights, but older ones sampled a resumed sample's first tokens"
)
_PR = "partial_rollout.enable=True"
_SEPARATE, _COLOCATED = "partial_rollout.placement=separate", "partial_rollout.placement=colocated"
_UNCORRECTED, _CORRECTED = "partial_rollout.correction=none", "partial_rollout.correction=decoupled"
# The config may be of a run that lacked a key; the settings have its default.
_own = PartialRolloutConfig.from_config


def _region(config: DictConfig) -> BehaviourRegion | None:
    return BehaviourRegion.of(_own(config), config.actor_rollout_ref.actor)


_ENGINES = (
    *where(
        lambda c: not engine_devices(c),
        Rule(
            "rollout.tensor_model_parallel_size",
            lambda _, c: trainer_devices(c) % replica_devices(c) == 0,
            lambda c: (
                f"{trainer_devices(c)} device(s) must make whole replicas; one replica takes {replica_devices(c)}"
            ),
        ),
    ),
    *where(
        "trainer.device=cpu",
        *(only(key, None, "vLLM's draft proposers change the sampled tokens on a CPU") for key in _DRAFTS),
    ),
    # The recipe has parts of its own there.
    Rule(
        "rollout.agent.agent_loop_manager_class",
        lambda v, _: v is None or v.startswith("recipe.partial_rollout."),
        "null: the recipe has its own; loops of yours go into agent_loop_config_path",
    ),
    only("rollout.checkpoint_manager_class", None, "the recipe has its own"),
    only("trainer.checkpoint_callback_class", None, "only verl's v1 calls it, and before the checkpoint is complete"),
    *(only(key, None, "data.mm_processor_kwargs reaches the trainer, too") for key in _spelt("mm_processor_kwargs")),
)
_PARTIAL_ROLLOUT = (
    # the recipe's keys, compared with each other
    *where(NO_PR, only("partial_rollout.placement", "colocated")),
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
        "at least 0; or, with partial_rollout.mode=april, so that (1 + overlap) * data.train_batch_size is at least 1",
    ),
    *where(
        lambda c: _own(c).mode is not Mode.WINDOW,
        Rule("partial_rollout.max_staleness", lambda v, _: v >= 1, lambda c: f"at least 1 in mode {_own(c).mode}"),
    ),
    # The deadline of a call must pass before the deadline of the sample or the round that the call is part of.
    Rule(
        "partial_rollout.failures.tool_timeout_s",
        lambda _, c: (_own(c).failures.tool_timeout_s or 0) <= (_own(c).failures.sample_timeout_s or inf),
        lambda c: f"at most partial_rollout.failures.sample_timeout_s={_own(c).failures.sample_timeout_s}",
        "otherwise the sample's timeout passes first",
    ),
    Rule(
        "partial_rollout.tools.release_after_s",
        lambda _, c: min(_own(c).tools.release_after_s, _own(c).parked_s or inf) < _own(c).deadlines.stall_s,
        lambda c: f"below partial_rollout.deadlines.stall_s={_own(c).deadlines.stall_s:g}",
        "otherwise a call within its own deadline would end the run",
    ),
    *where(
        (V1, NO_PR),
        only("rollout.enable_rollout_routing_replay", False, "rows of verl's v1 carry no routes"),
        only("distillation.enabled", False, "rows of verl's v1 carry nothing of a teacher"),
    ),
    *where(
        V1,
        only("trainer.v1.sampler.custom_sampler.path", None, "the recipe's manager makes the batches"),
        only("trainer.v1.sampler.max_off_policy_threshold", 8, "partial_rollout.max_staleness is the bound"),
        only("trainer.v1.sampler.max_off_policy_strategy", "drop", "nothing is dropped, a round waits"),
        only("trainer.v1.sampler.sync_refill_failed_groups", False, "a failed sample is retried, then masked"),
        only("skip.rollout_tq.enable", False, "the recipe makes the batches, not verl's rollout"),
    ),
    *where(
        _PR,
        only("skip.rollout.enable", False, "the recipe makes the batches, not verl's rollout"),
        only("rollout.name", "vllm", "partial rollout can interrupt no other engine"),
        only("rollout.calculate_log_probs", True, "samples span versions: the engine's own log-probs are needed"),
        Rule(
            "rollout.load_format",
            lambda v, c: "dummy" not in v or not lora_rank(c) or at(c, "model.lora.merge"),
            "safetensors, or auto, with LoRA adapters",
            "an engine that replaces a dead one gets only the adapters from the trainer, and the base model from its files",
        ),
        only(
            "rollout.logprobs_mode",
            "processed_logprobs",
            "other modes are not the log-probs of the distribution that was sampled",
        ),
        only("rollout.enable_rollout_routing_replay", False, _NEWER_ROUTES),
        one_of(ROUTER_REPLAY, ("disabled", "R2", None), _NEWER_ROUTES),
        only("rollout.disaggregation.enabled", False, "a resumed sample is prefilled on the replica that decodes it"),
        only(
            "rollout.full_determinism",
            False,
            "every engine call gets the same seed, so a resumed call would repeat the random numbers of its first tokens",
        ),
        *where(
            "partial_rollout.resume_kv=keep",
            only("rollout.enable_prefix_caching", True, "vLLM finds the kept KV cache through its prefix cache"),
            only("rollout.free_cache_engine", False, "an engine that sleeps loses its KV cache"),
        ),
        only("distillation.enabled", False, "its loss has no correction for older weights"),
        Rule(
            "algorithm.adv_estimator",
            lambda v, _: v != "remax",
            "any other",
            "verl computes its greedy baseline in a synchronous rollout",
        ),
        Rule(
            CORRECTION,
            lambda v, _: v is not None,
            "a section of keys, as in verl's own config",
            "partial_rollout.correction=none switches the correction off",
        ),
    ),
    only(
        f"{CORRECTION}.bypass_mode",
        False,
        "verl changes the driver's loss after the workers have copied theirs, so loss_type, rollout_is and rollout_rs "
        "never act; under partial rollout trust_region=mask bounds the ratio to the behaviour policy",
    ),
    one_of(f"{CORRECTION}.loss_type", ("ppo_clip", None), "only bypass_mode reads it"),
    # Partial rollout gives each worker a sample at a time.
    *where(
        (NO_PR, "trainer.use_v1=False"),
        Rule(
            "rollout.agent.num_workers",
            lambda v, c: at(c, BATCH) * at(c, "rollout.n") % v == 0,
            lambda c: f"a divisor of {at(c, BATCH) * at(c, 'rollout.n')} ({BATCH} * rollout.n)",
            "verl deals a batch evenly to the workers",
        ),
    ),
    *where(
        (_UNCORRECTED, _PR),
        one_of("partial_rollout.trust_region", (TrustRegion.AUTO, TrustRegion.NONE)),
        one_of(f"{CORRECTION}.rollout_is", (None,)),
    ),
    *where(
        lambda c: c.partial_rollout.enable,
        Rule(
            _BOUNDS,
            lambda v, c: v is None or _region(c) is not None,
            lambda c: (
                f"null: partial_rollout.trust_region={_own(c).trust_region} is no region with "
                f"partial_rollout.correction={_own(c).correction} and loss_mode={at(c, LOSS)}"
                + ("" if _own(c).correction is Correction.NONE else "; or set partial_rollout.trust_region=mask")
            ),
        ),
    ),
    *where(
        ("partial_rollout.trust_region=mask", _PR, lambda c: at(c, LOSS) in DIVERGENCE_LOSSES),
        Rule(
            _BOUNDS,
            lambda v, _: v is not None,
            "[low, high], such as [0.2,0.2]",
            "the clip bounds of dppo_tv and dppo_kl are thresholds of a divergence, not of a ratio",
        ),
    ),
    *where(
        (_CORRECTED, _PR),
        *(
            one_of(
                f"rollout.{key}",
                WHOLE[key],
                "otherwise the engine normalises over the tokens that are kept, and the trainer over all",
            )
            for key in ("top_p", "top_k")
        ),
        Rule(
            "rollout.temperature",
            lambda v, _: v >= 0.01,
            "at least 0.01",
            "vLLM raises a smaller one to 0.01, and 0 is greedy",
        ),
        *(
            only(key, None, "the engine's log-probs have the changes of its processors, and the trainer's do not")
            for key in _spelt("logits_processors")
        ),
        *where(
            lambda c: weight_granularity(at(c, LOSS)) is not WeightGranularity.TOKEN,
            one_of(
                f"{CORRECTION}.rollout_is",
                (None, WeightGranularity.GEOMETRIC, WeightGranularity.SEQUENCE),
                "the loss has one ratio for each sequence",
            ),
        ),
    ),
    # where the engines run
    *where(_COLOCATED, only(_BACKEND, "naive", "trainer and engines share their devices")),
    *where(
        lambda _: not releases.is_tested(),
        only("partial_rollout.placement", "colocated", f"to pause engines while they decode {_TESTED}"),
        only("partial_rollout.resume_kv", "recompute", f"a KV cache of several weights {_TESTED}"),
    ),
    *where(
        _SEPARATE,
        only("rollout.free_cache_engine", False, "the engines never sleep"),
        *where(REWARD_MODEL, only("reward.reward_model.enable_resource_pool", True, SCORES_LATE)),
        *(
            Rule(f"rollout.{key}", lambda v, _: v >= 1, "at least 1", "these are the engines' own devices")
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
        Rule(
            _BACKEND,
            lambda v, _: v != "naive",
            "shm (one node) or nccl (GPUs)",
            "naive needs engines on the trainer's devices",
        ),
        Rule(
            "model.lora.merge",
            lambda v, c: v or not lora_rank(c),
            "True",
            "the transfer takes whole weights, no adapters",
        ),
    ),
    *where(
        (f"{_BACKEND}=shm", _SEPARATE),
        *(
            only(key, 1, "other nodes do not see the file of shm; nccl works across nodes")
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
            "otherwise fewer than N groups are in flight while N are trained, and the trainer waits for the next batch",
        ),
    ),
)
"""rules whose violation prints a warning; the run starts all the same"""


def _engine_keys(config: DictConfig) -> Iterator[Rule]:
    """A rule for each of vLLM's arguments that overrides a key of ``rollout``, which other rules and the recipe read."""
    for name in at(config, _VLLM) or {}:
        # vLLM takes --no-enable-prefix-caching for a False.
        if key := _OF_ROLLOUT.get(str(name).replace("-", "_").removeprefix("no_")):
            yield Rule(f"{_VLLM}.{name}", lambda v, _: v is None, "must be null", f"set {full(f'rollout.{key}')}")


def _model_keys(config: DictConfig) -> Iterator[Rule]:
    """A rule for each key of the model that ``override_config`` changes, because verl gives these to no engine."""
    override, path = at(config, _OVERRIDE) or {}, _OVERRIDE
    if "model_config" in override:
        override, path = override["model_config"] or {}, f"{path}.model_config"
    for name, _ in leaves(override):
        if not (_TRAINERS_OWN.fullmatch(name) or NOISE.fullmatch(name)):
            theirs = f"{_VLLM}.hf_overrides.{name}"
            yield Rule(
                f"{path}.{name}",
                lambda v, c, theirs=theirs: at(c, theirs) == v,
                lambda c, theirs=theirs: f"left out, or the same as +{full(theirs)}, which is {at(c, theirs)}",
                "verl overrides the trainer's model alone, and the engine would sample from another",
            )


def check_rules(config: DictConfig) -> Iterator[ConfigError]:
    """Yield an error for each rule that ``config`` breaks; print warnings."""
    for warning in broken(WARNINGS, config):
        say(f"warning: {warning}", error=True)
    # A v1 trainer of verl's own has its own rollout.
    ours = () if verls_own(config) else (*_ENGINES, *_PARTIAL_ROLLOUT, *where(_PR, *_engine_keys(config)))
    return broken((*TRAINING, *LEARNING, *ours, *where("rollout.name=vllm", *_model_keys(config))), config)
