"""What a training needs of verl's own keys: a correction that acts, and an attention that is installed.

verl leaves its rollout correction off by default, and several settings make it ignore the correction without a warning.
Each of them is refused here, so that nothing trains uncorrected without being told.

With torch's own attention nothing is packed. Packing would be correct: transformers masks the sequences of a packed row
from each other. But the mask's size is the square of the row's tokens, 1 GiB for the 32k of a micro-batch. Instead, padded
micro-batches hold sequences of similar length (``verl_ext.like_length_batches``).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.trainer.ppo.utils import need_critic
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig

from recipe.partial_rollout.config.choices import Correction, TrustRegion
from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.training.loss import DECOUPLED_PPO, WeightLevel, weight_level
from verl_ext import attention, chunked_log_probs

_NODE = "algorithm.rollout_correction"
_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_PROBED_FIELDS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")


def check_correction(config: DictConfig, settings: PartialRolloutConfig) -> None:
    """Raise ``ConfigError`` for a combination that would silently train uncorrected."""
    correction = config.algorithm.get("rollout_correction")
    if correction is None:
        raise fail(_NODE, None, "verl's node of that name; partial_rollout.correction=none switches the correction off")
    if correction.bypass_mode:
        raise fail(
            f"{_NODE}.bypass_mode",
            True,
            "False: verl changes the driver's loss once the workers have theirs, so loss_type, rollout_is and rollout_rs "
            "never act; partial_rollout.trust_region=mask bounds the ratio to the behaviour policy",
        )
    if settings.correction is Correction.NONE:
        _check_uncorrected(config, settings, correction)
    else:
        _check_decoupled(config, correction)


def _check_uncorrected(config: DictConfig, settings: PartialRolloutConfig, correction: Any) -> None:
    if settings.trust_region is TrustRegion.MASK:
        raise fail("partial_rollout.trust_region", "mask", "none with partial_rollout.correction=none")
    if correction.rollout_is is not None:
        raise fail(f"{_NODE}.rollout_is", correction.rollout_is, "null with partial_rollout.correction=none")
    if config.actor_rollout_ref.actor.policy_loss.loss_mode == DECOUPLED_PPO:
        raise fail(_LOSS_MODE, DECOUPLED_PPO, "any other with partial_rollout.correction=none")


def _check_decoupled(config: DictConfig, correction: Any) -> None:
    level = weight_level(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    allowed = [each for each in WeightLevel if level is WeightLevel.TOKEN or each is not WeightLevel.TOKEN]
    if correction.rollout_is is not None and correction.rollout_is not in allowed:
        names = " or ".join(allowed)
        mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
        raise fail(f"{_NODE}.rollout_is", correction.rollout_is, f"{names}, or null for {level}, with loss_mode={mode}")
    if not _keeps_on_policy_tokens(correction.rollout_is or level, correction.rollout_is_threshold):
        raise fail(
            f"{_NODE}.rollout_is_threshold",
            correction.rollout_is_threshold,
            "a number above 0 (caps the weights), or lower_upper around 1 (masks tokens outside)",
        )
    _check_loss(config.actor_rollout_ref.actor)


def _keeps_on_policy_tokens(level: str, threshold: Any) -> bool:
    """Whether verl accepts the threshold, and a token of weight 1 keeps it."""
    on_policy, mask = torch.zeros(1, 1), torch.ones(1, 1)
    try:
        weights, _ = compute_rollout_correction_weights(on_policy, mask, level, rollout_is_threshold=threshold)
    except (TypeError, ValueError):
        return False
    return bool(weights.any())


def _check_loss(actor: DictConfig) -> None:
    mode = actor.policy_loss.loss_mode
    dual_clip = actor.clip_ratio_c
    if dual_clip is not None and not dual_clip > 1:
        raise fail("actor_rollout_ref.actor.clip_ratio_c", dual_clip, "a number above 1, or null for no dual clip")
    if dual_clip is None and mode not in ("vanilla", DECOUPLED_PPO):
        raise fail("actor_rollout_ref.actor.clip_ratio_c", None, f"a number above 1 with loss_mode={mode}")
    try:
        weighted = uses_weights(actor)
    except (AssertionError, TypeError, ValueError) as error:
        raise fail(_LOSS_MODE, mode, f"a loss that takes rollout_is_weights; it raises: {error}") from error
    if not weighted:
        raise fail(
            _LOSS_MODE,
            mode,
            "a loss that uses rollout_is_weights; this one ignores them (partial_rollout.correction=none allows it)",
        )


def uses_weights(actor: DictConfig) -> bool:
    """Whether the policy loss of verl's actor config changes when the behaviour weights of all tokens are halved."""
    mode = DECOUPLED_PPO if actor.policy_loss.loss_mode == "vanilla" else actor.policy_loss.loss_mode
    probed = ActorConfig(
        strategy="none",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=omega_conf_to_dataclass(actor.policy_loss),
        **{key: actor[key] for key in _PROBED_FIELDS},
    )
    losses = []
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
    return abs(losses[0] - losses[1]) > 1e-3 * abs(losses[0])


def wire_correction(config: DictConfig) -> None:
    """Fill in verl's keys for the correction asked for; ``config`` has passed ``check_correction``."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    if config.partial_rollout.correction == Correction.NONE:
        print(
            "warning: partial_rollout.correction=none: samples that span policy versions train without behaviour weights",
            file=sys.stderr,
        )
        return
    if correction.rollout_is is None:
        correction.rollout_is = str(weight_level(actor.policy_loss.loss_mode))
    if actor.policy_loss.loss_mode == "vanilla":
        # verl's vanilla loss times the weights; unlike it, this loss raises if they are missing.
        actor.policy_loss.loss_mode = DECOUPLED_PPO


# -- attention ---------------------------------------------------------------------------------------------------------

_ATTENTION = "override_config.attn_implementation"
_SEQUENCE_PARALLEL = "ulysses_sequence_parallel_size"


def choose_attention(config: DictConfig) -> None:
    """Give every model of ``config`` an attention that is installed; one that the user named stays.

    Prints how log-probs are computed, and the attention if it is not verl's default. Call it before interpolations are
    resolved, because some copy its result.

    Raises:
        ConfigError: flash-attn is asked for, by name or by sequence parallelism, and is not installed.
    """
    if config.actor_rollout_ref.actor.strategy not in ("fsdp", "fsdp2"):
        # Megatron brings its own.
        return
    print(f"log-probs of the trainer: {chunked_log_probs.in_force()}")
    problem = attention.flash_attn_problem()
    remedy = f"{problem}: {attention.INSTALL}"
    models: dict[str, tuple[str, ...]] = {
        "actor_rollout_ref.model": ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
    }
    if need_critic(config):
        models["critic.model"] = ("critic",)
    fallen = []
    for path, engines in models.items():
        asked = OmegaConf.select(config, f"{path}.{_ATTENTION}")
        if problem and asked == attention.FLASH:
            raise fail(f"{path}.{_ATTENTION}", asked, f"{attention.FALLBACK}, or null: {remedy}")
        if problem and asked is None:
            _fall_back(config, path)
            fallen.append(path)
        if problem or asked not in (None, attention.FLASH):
            _refuse_sequence_parallelism(config, engines, remedy if problem else f"{path}.{_ATTENTION}=null")
    if fallen:
        print(
            f"attention of {' and '.join(fallen)}: torch's own ({attention.FALLBACK}), unpacked; for verl's default, "
            f"{attention.FLASH}, {remedy}"
        )


def _fall_back(config: DictConfig, path: str) -> None:
    OmegaConf.update(config, f"{path}.{_ATTENTION}", attention.FALLBACK, force_add=True)
    OmegaConf.update(config, f"{path}.use_remove_padding", False, force_add=True)


def _refuse_sequence_parallelism(config: DictConfig, engines: tuple[str, ...], remedy: str) -> None:
    """Refuse sequence parallelism: verl implements it for flash-attn; others silently attend within their own piece."""
    for engine in engines:
        for key in (f"{engine}.{_SEQUENCE_PARALLEL}", f"{engine}.fsdp_config.{_SEQUENCE_PARALLEL}"):
            if (size := OmegaConf.select(config, key) or 1) > 1:
                raise fail(key, size, f"1 with any attention but {attention.FLASH} ({remedy})")
