"""What partial rollout needs of verl's keys, a rule a row."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from recipe.partial_rollout.config.choices import ResumeKV
from recipe.partial_rollout.preflight.rule import ACTOR, ROLLOUT, Rule


def _must(key: str, wanted: Any, why: str) -> Rule:
    """A key that partial rollout needs to have one value; null is false."""
    words = f"with partial_rollout.enable=True it must be {wanted}: {why}"
    return Rule(key, lambda value, _: (value or False) == wanted, words)


def _no_replay(engine: str) -> Rule:
    return Rule(
        f"{ACTOR}.{engine}.router_replay.mode",
        lambda mode, _: (mode or "disabled") == "disabled",
        "disabled with partial_rollout.enable=True: routes are not kept over interruptions",
    )


def _keeps_kv(config: DictConfig) -> bool:
    return config.partial_rollout.resume_kv == ResumeKV.KEEP


PR_RULES = (
    _must(f"{ROLLOUT}.name", "vllm", "other engines are not interrupted by it"),
    _must(
        f"{ROLLOUT}.calculate_log_probs", True, "samples span policy versions, so the engine's own log-probs are needed"
    ),
    _must(
        f"{ROLLOUT}.enable_rollout_routing_replay",
        False,
        "an interrupted sample loses the routes of its earlier tokens",
    ),
    _must(f"{ROLLOUT}.disaggregation.enabled", False, "an interrupted sample is prefilled again where it is decoded"),
    _must(
        f"{ROLLOUT}.full_determinism",
        False,
        "every request is seeded alike, so a resumed sample would draw old noise",
    ),
    _no_replay("megatron"),
    _no_replay("veomni"),
    Rule(
        "partial_rollout.resume_kv",
        lambda _, c: not c.actor_rollout_ref.rollout.free_cache_engine,
        f"recompute with {ROLLOUT}.free_cache_engine=True: an engine that sleeps gives its KV cache up, and the recipe "
        "does not use vLLM's KV offloading",
        _keeps_kv,
    ),
    Rule(
        "partial_rollout.resume_kv",
        lambda _, c: c.actor_rollout_ref.rollout.enable_prefix_caching,
        f"recompute with {ROLLOUT}.enable_prefix_caching=False",
        _keeps_kv,
    ),
    Rule(
        "distillation.enabled",
        lambda on, _: not on,
        "False with partial_rollout.enable=True: its loss has no correction",
    ),
    Rule(
        "algorithm.adv_estimator",
        lambda estimator, _: estimator != "remax",
        "any other: its greedy baseline needs the synchronous rollout",
    ),
)
