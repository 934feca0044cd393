"""What partial rollout needs of verl's keys, a rule a row.

verl leaves its rollout correction off by default, and several settings make it ignore the correction without a warning.
Each of them is refused, so that nothing trains uncorrected without being told.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig
from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, RolloutReplica

from recipe.partial_rollout.config.choices import Correction, ResumeKV, TrustRegion
from recipe.partial_rollout.preflight.rule import ACTOR, ROLLOUT, Rule, off
from recipe.partial_rollout.training.loss import DECOUPLED_PPO, WeightLevel, weight_level

_CORRECTION = "algorithm.rollout_correction"
_LOSS = f"{ACTOR}.policy_loss.loss_mode"
_PROBED_FIELDS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")


def _must(key: str, wanted: Any, why: str) -> Rule:
    """A key that partial rollout needs to have one value; null is false."""
    words = f"with partial_rollout.enable=True it must be {wanted}: {why}"
    return Rule(key, lambda value, _: (value or False) == wanted, words)


def _server_calls(config: DictConfig) -> int:
    """That verl's server takes at once."""
    server: Any = RolloutReplica.max_concurrency
    return server.fget(SimpleNamespace(config=config.actor_rollout_ref.rollout))


def _no_replay(engine: str) -> Rule:
    return Rule(
        f"{ACTOR}.{engine}.router_replay.mode",
        lambda mode, _: (mode or "disabled") == "disabled",
        "disabled with partial_rollout.enable=True: routes are not kept over interruptions",
    )


# -- the correction ----------------------------------------------------------------------------------------------------


def _uncorrected(config: DictConfig) -> bool:
    return config.partial_rollout.correction == Correction.NONE


def _corrected(config: DictConfig) -> bool:
    return not _uncorrected(config)


def _loss_mode(config: DictConfig) -> str:
    return config.actor_rollout_ref.actor.policy_loss.loss_mode


def _levels(config: DictConfig) -> list[WeightLevel]:
    """Those that fit the loss."""
    token = weight_level(_loss_mode(config)) is WeightLevel.TOKEN
    return [level for level in WeightLevel if token or level is not WeightLevel.TOKEN]


def _keeps_on_policy_tokens(threshold: Any, config: DictConfig) -> bool:
    """Whether verl accepts the threshold, and a token of weight 1 keeps it."""
    level = config.algorithm.rollout_correction.rollout_is or weight_level(_loss_mode(config))
    on_policy, mask = torch.zeros(1, 1), torch.ones(1, 1)
    try:
        weights, _ = compute_rollout_correction_weights(on_policy, mask, level, rollout_is_threshold=threshold)
    except (TypeError, ValueError):
        return False
    return bool(weights.any())


def _needed_of_loss(config: DictConfig) -> str:
    """What the policy loss lacks; nothing if it changes when the behaviour weights of all tokens are halved."""
    actor, losses = config.actor_rollout_ref.actor, []
    mode = DECOUPLED_PPO if _loss_mode(config) == "vanilla" else _loss_mode(config)
    try:
        probed = ActorConfig(
            strategy="none",
            rollout_n=1,
            use_dynamic_bsz=True,
            policy_loss=omega_conf_to_dataclass(actor.policy_loss),
            **{key: actor[key] for key in _PROBED_FIELDS},
        )
        for weight in (1.0, 0.5):
            # clip_cov draws tokens at random: it must draw the same ones both times and leave the caller's generator alone.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                advantages = torch.tensor([[1.0] * 8, [-1.0] * 8])
                log_prob = -torch.rand(2, 8)
                old_log_prob = log_prob - 0.01 * torch.rand(2, 8)
                loss, _ = POLICY_LOSS_REGISTRY[mode](
                    old_log_prob=old_log_prob,  # type: ignore[call-arg]
                    log_prob=log_prob,
                    advantages=advantages,
                    response_mask=torch.ones(2, 8),
                    loss_agg_mode="token-mean",
                    config=probed,
                    rollout_is_weights=torch.full((2, 8), weight),
                )
            losses.append(float(loss))
    except (AssertionError, TypeError, ValueError) as error:
        return f"a loss that takes rollout_is_weights; it raises: {error}"
    if abs(losses[0] - losses[1]) > 1e-3 * abs(losses[0]):
        return ""
    return "a loss that uses rollout_is_weights; this one ignores them (partial_rollout.correction=none allows it)"


_WITHOUT = "with partial_rollout.correction=none"

PR_RULES = (
    _must(f"{ROLLOUT}.name", "vllm", "other engines are not interrupted by it"),
    _must(
        f"{ROLLOUT}.calculate_log_probs", True, "samples span policy versions, so the engine's own log-probs are needed"
    ),
    _must(f"{ROLLOUT}.logprobs_mode", "processed_logprobs", "others are not log-probs of what was sampled"),
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
        lambda _, c: (r := c.actor_rollout_ref.rollout).enable_prefix_caching and not r.free_cache_engine,
        f"recompute with {ROLLOUT}.enable_prefix_caching=False, or free_cache_engine=True: an engine that sleeps gives "
        "its KV cache up, and the recipe does not use vLLM's KV offloading",
        lambda c: c.partial_rollout.resume_kv == ResumeKV.KEEP,
    ),
    _must("distillation.enabled", False, "its loss has no correction"),
    Rule(
        "partial_rollout.slots_per_replica",
        lambda slots, c: slots is None or slots <= _server_calls(c) - CONTROL_METHOD_CONCURRENCY,
        # An interruption that queues behind samples comes when they end.
        lambda c: (
            f"at most {_server_calls(c) - CONTROL_METHOD_CONCURRENCY}: verl's server takes {_server_calls(c)} at once, "
            f"{CONTROL_METHOD_CONCURRENCY} of them for control (more with a larger {ROLLOUT}.max_num_seqs)"
        ),
    ),
    Rule(
        "algorithm.adv_estimator",
        lambda estimator, _: estimator != "remax",
        "any other: its greedy baseline needs the synchronous rollout",
    ),
    Rule(
        _CORRECTION,
        lambda node, _: node is not None,
        "verl's node of that name; partial_rollout.correction=none switches the correction off",
    ),
    off(
        f"{_CORRECTION}.bypass_mode",
        "verl changes the driver's loss once the workers have theirs, so loss_type, rollout_is and rollout_rs never act; "
        "partial_rollout.trust_region=mask bounds the ratio to the behaviour policy",
    ),
    Rule(
        "partial_rollout.trust_region", lambda region, _: region != TrustRegion.MASK, f"none {_WITHOUT}", _uncorrected
    ),
    Rule(f"{_CORRECTION}.rollout_is", lambda level, _: level is None, f"null {_WITHOUT}", _uncorrected),
    Rule(_LOSS, lambda mode, _: mode != DECOUPLED_PPO, f"any other {_WITHOUT}", _uncorrected),
    Rule(
        f"{_CORRECTION}.rollout_is",
        lambda level, c: level is None or level in _levels(c),
        lambda c: (
            f"{' or '.join(_levels(c))}, or null for {weight_level(_loss_mode(c))}, with loss_mode={_loss_mode(c)}"
        ),
        _corrected,
    ),
    Rule(
        f"{_CORRECTION}.rollout_is_threshold",
        _keeps_on_policy_tokens,
        "a number above 0 (caps the weights), or lower_upper around 1 (masks tokens outside)",
        _corrected,
    ),
    Rule(
        f"{ACTOR}.clip_ratio_c",
        lambda bound, c: bound is None or bound > 1,
        "a number above 1, or null for no dual clip",
        _corrected,
    ),
    Rule(
        f"{ACTOR}.clip_ratio_c",
        lambda bound, c: bound is not None or _loss_mode(c) in ("vanilla", DECOUPLED_PPO),
        lambda c: f"a number above 1 with loss_mode={_loss_mode(c)}",
        _corrected,
    ),
    Rule(_LOSS, lambda _, c: not _needed_of_loss(c), _needed_of_loss, _corrected),
)
