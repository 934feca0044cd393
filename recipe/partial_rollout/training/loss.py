"""The actor workers' loss under partial rollout: decoupled PPO inside a trust region.

Decoupled PPO is AReaL's equation 5 (arXiv:2505.24298), which is verl's ``vanilla`` loss times behaviour weights. For every
generated token, with ``r = pi_theta / pi_prox`` and ``w = pi_prox / pi_behav``::

    loss = -w * min(r * A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) * A)

``w`` is the ``rollout_is_weights`` of verl's rollout correction, capped or masked there (``rollout_is_threshold``: one
number caps, ``lower_upper`` zeroes what is outside). verl's other losses take the same weights.

``corrected_ppo_loss`` is the worker's loss function. It takes ``pi_prox`` from the update's own forward pass where
``needs_pass`` allows it, masks the tokens outside the trust region, then calls verl's ``ppo_loss``. If the config asks
for weights and the batch has none, it raises: it never trains uncorrected.

**The proximal policy.** Where a batch is trained in one update, the update's forward pass runs on the weights before it:
the loss has the log-probs of ``pi_prox``, and verl's pass over the batch computes them a second time. That pass is left
out if nothing else needs it, except in step 1 and every tenth after it. Those steps log verl's metrics of the pass, and
``proximal/error``, the mean absolute difference of the two log-probs. In a step without the pass verl is in its
``bypass_mode``: it takes the behaviour log-probs for the proximal ones and derives no metrics from them. The loss then
logs the metrics that the recipe reads, under verl's names. Entropy, which costs another run over the logits, is logged
only if the loss has it.

**The region.** With one update a batch ``r`` is 1, the clip never acts, and nothing limits ``rho = pi_theta / pi_behav``. A
region does. With the advantage ``A`` and the bounds ``low`` and ``high``, a token is outside if ``rho > 1 + high`` and
``A > 0``, or ``rho < 1 - low`` and ``A < 0``. It gets the weight 0. Every loss that the recipe accepts multiplies a token's
loss by its weight, so the gradient is gone and the denominator keeps the token. Entropy and KL losses are never masked.

With one ratio a sequence (``gspo``, ``geo_mean``) ``rho`` is the geometric mean over the sequence, whose tokens are in or
out together, by the sign of their mean advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
import verl.utils.torch_functional as verl_F
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.rollout_corr_helper import SAFETY_BOUND, compute_rollout_correction_weights
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from recipe.partial_rollout.config.settings import Correction, PartialRolloutConfig, TrustRegion
from verl_ext.behaviour_weights import weights_alone

VERSION = "partial_rollout_version"
"""non-tensor datum of a batch: the policy version of the weights before its update"""
ROUTER_REPLAY = "actor.megatron.router_replay.mode"
"""verl's key below ``actor_rollout_ref``: source of the expert routes of an update"""
REPORTED_AS = "actor/logged/"
"""prefix of the loss's metrics, which ``logged`` removes; verl would add ``actor/`` to a name without it"""

# Means over the tokens of which the trainer logs a ratio.
WEIGHT_MEAN, WEIGHT_SQUARE = "rollout_corr/rollout_is_mean", "weight_square"
KV_GAP, KV_GAP_SHARE = "kv_gap", "kv_gap_share"

NO_DUAL_CLIP = 1e9
"""``clip_ratio_c`` that bounds nothing: ratios reach e^20, where verl clamps them"""
_READ = "response_mask old_log_probs rollout_log_probs rollout_versions advantages rollout_is_weights"
"""tensors [B, R] that the loss reads; without ``rollout_is_weights`` it computes the weights, if the run uses any"""

_READS_OLD_LOG_PROBS = ("optimal_token_baseline", "tir_optimal_token_baseline")


class WeightGranularity(StrEnum):
    """The likelihood ratio that weights a token; the values of ``rollout_correction.rollout_is``."""

    TOKEN = "token"
    """the token's own ratio"""
    GEOMETRIC = "geometric"
    """the geometric mean over its sequence; its noise does not grow with length (``verl_ext.behaviour_weights``)"""
    SEQUENCE = "sequence"
    """the product over its sequence; unbiased, but its noise grows with length"""


SEQUENCE_LEVEL_LOSSES = frozenset({"gspo", "geo_mean"})
"""verl's policy losses with one ratio for a sequence; token-level weights do not fit them"""


DIVERGENCE_LOSSES = frozenset({"dppo_tv", "dppo_kl"})
"""verl's policy losses whose clip bounds are thresholds of a divergence, which say nothing of a ratio"""


def weight_granularity(loss_mode: str) -> WeightGranularity:
    """The behaviour weights that fit verl's policy loss ``loss_mode``."""
    return WeightGranularity.GEOMETRIC if loss_mode in SEQUENCE_LEVEL_LOSSES else WeightGranularity.TOKEN


# -- the loss ----------------------------------------------------------------------------------------------------------


def worker_loss(
    actor: DictConfig, settings: PartialRolloutConfig, policy: ProximalPolicy
) -> Callable[..., tuple[torch.Tensor, dict[str, Any]]]:
    """Return the loss of a run's actor workers; ``actor`` is verl's config of the actor."""
    region = BehaviourRegion.of(settings, actor)
    # A partial of a function of this module: it travels to the workers as a pickle.
    return partial(corrected_ppo_loss, config=config_of(actor), policy=policy, region=region)


def config_of(actor: DictConfig) -> ActorConfig:
    """Return verl's actor config as its losses read it; where ``clip_ratio_c`` is null it is ``NO_DUAL_CLIP``, no bound."""
    config = omega_conf_to_dataclass(actor)
    return replace(config, clip_ratio_c=NO_DUAL_CLIP) if config.clip_ratio_c is None else config


def corrected_ppo_loss(
    config: ActorConfig,
    model_output: dict[str, Any],
    data: TensorDict,
    dp_group: Any = None,
    *,
    policy: ProximalPolicy,
    region: BehaviourRegion | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute verl's ``ppo_loss`` on the proximal policy of the run, within the trust region if there is one.

    Args:
        config, model_output, dp_group: as for ``ppo_loss``.
        data: a micro-batch, with ``VERSION``, ``rollout_log_probs`` and ``rollout_versions`` [B, R].
        policy: source of the proximal log-probs and of the weights.
        region: the trust region; None if there is none.

    Raises:
        RuntimeError: the policy asks for weights, and there are none.
    """
    data = _divisible(data)
    version: Any = tu.get_non_tensor_data(data, VERSION, default=None)
    # Whether verl has recomputed ``old_log_probs``, and logs what it derives from them.
    recomputed = policy.recomputes(version + 1)
    padded = data.select(*_READ.split(), strict=False).to_padded_tensor()
    behaviour, mask = padded["rollout_log_probs"], padded["response_mask"]
    # Nested tensors are padded with 0, which is a version.
    padded["rollout_versions"] = padded["rollout_versions"].masked_fill(mask == 0, -1)
    # As proximal policy it is a constant: only verl's own copy of it carries the gradient.
    current = no_padding_2_padding(model_output["log_probs"], data).detach().to(behaviour.dtype)
    proximal, weights, reported = _corrected(policy, padded, current, recomputed=recomputed)
    newest = _newest_of_older(padded["rollout_versions"], version)
    reported |= {KV_GAP: (proximal - behaviour).abs() * newest, KV_GAP_SHARE: newest}
    if region is not None:
        # A masked token has the weight 0, so the region needs weights to write into.
        assert weights is not None, "a region without weights is refused before Ray starts"
        outside = region.outside(current, behaviour, padded["advantages"], mask)
        weights = weights.masked_fill(outside, 0)
        reported |= masked_parts(outside, padded["advantages"], age=version - padded["rollout_versions"])
    # A shallow copy: the engine's micro-batch keeps its own ``old_log_probs``.
    corrected = data.clone(recurse=False)
    corrected["old_log_probs"] = proximal
    if weights is not None:
        corrected["rollout_is_weights"] = weights
    loss, metrics = ppo_loss(config=config, model_output=model_output, data=corrected, dp_group=dp_group)
    # With its pass over the batch verl logs the entropy itself.
    entropy = None if recomputed else model_output.get("entropy")
    if entropy is not None:
        entropy = no_padding_2_padding(entropy, data).detach()
    return loss, metrics | _means(reported, entropy, mask, config)


def _divisible(data: TensorDict) -> TensorDict:
    """``data`` with at least one token to divide by.

    verl divides by the tokens of the mini-batch. Where all are masked, the loss and the gradient would be nan; they are 0.
    """
    if tu.get_non_tensor_data(data, "batch_num_tokens", default=None) != 0:
        return data
    data = data.clone(recurse=False)
    tu.assign_non_tensor(data, batch_num_tokens=1)
    return data


def _corrected(
    policy: ProximalPolicy, padded: TensorDict, current: torch.Tensor, *, recomputed: bool
) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Return the proximal log-probs and the behaviour weights, each [B, R], and metrics [B, R].

    The weights are None if the run has none.

    Args:
        current: [B, R], the update's own log-probs.
        recomputed: whether ``old_log_probs`` of the batch were recomputed by verl.

    Raises:
        RuntimeError: the policy asks for weights, and the batch has none.
    """
    if not policy.from_update:
        weights = padded.get("rollout_is_weights", None)
        if policy.granularity is not None and weights is None:
            raise RuntimeError(
                "verl's trainer gave the batch no rollout_is_weights, though algorithm.rollout_correction.rollout_is is "
                "set; partial_rollout.correction=none trains without them"
            )
        return padded["old_log_probs"], weights, {}
    log_ratio = current - padded["rollout_log_probs"]
    weights = None
    if policy.granularity is not None:
        # verl computes twenty statistics beside them, which fail where a micro-batch has no token.
        with weights_alone():
            weights, _ = compute_rollout_correction_weights(
                log_ratio, padded["response_mask"], rollout_is=policy.granularity, rollout_is_threshold=policy.threshold
            )
    if recomputed:
        return current, weights, {"partial_rollout/proximal/error": (current - padded["old_log_probs"]).abs()}
    reported = {"rollout_corr/kl": -log_ratio, "rollout_corr/k3_kl": log_ratio.exp() - log_ratio - 1}
    if weights is not None:
        reported |= {WEIGHT_MEAN: weights, WEIGHT_SQUARE: weights.square()}
    return current, weights, reported


def _means(
    reported: dict[str, torch.Tensor], entropy: torch.Tensor | None, mask: torch.Tensor, config: ActorConfig
) -> dict[str, Metric]:
    """Return what this micro-batch adds to the means of ``reported`` and of the entropy, each [B, R], as verl logs them."""
    # Means over tokens, whatever the loss averages over: runs of different modes are compared.
    floats = {key: value.float() if value.dtype is torch.bool else value for key, value in reported.items()}
    means = {key: _mean_share(value, mask, config, "token-mean") for key, value in floats.items()}
    if entropy is not None:
        means["actor/entropy"] = _mean_share(entropy, mask, config, config.loss_agg_mode)
    return {REPORTED_AS + key: mean for key, mean in means.items()}


def _mean_share(value: torch.Tensor, mask: torch.Tensor, config: ActorConfig, mode: str) -> Metric:
    """Return what this micro-batch adds to the mean of ``value`` over the mini-batch. verl adds up these parts.

    Args:
        mode: averaging mode of verl's ``agg_loss``.
    """
    share = agg_loss(loss_mat=value, loss_mask=mask, loss_agg_mode=mode, **config.global_batch_info)
    return Metric(value=share, aggregation=AggregationType.SUM)


# -- the trust region --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BehaviourRegion:
    """The region of a run, as the worker's loss applies it."""

    low: float
    """how far below 1 the ratio may be"""
    high: float
    """how far above 1"""
    per_sequence: bool
    """whether the loss has one ratio a sequence"""

    @classmethod
    def of(cls, settings: PartialRolloutConfig, actor: DictConfig) -> BehaviourRegion | None:
        """Return the region that the settings ask for, or None; ``actor`` is verl's checked config of the actor.

        ``auto`` means none without a correction, and none for a sequence-level loss. The clip bounds of such a
        loss, 3e-4, are made for ratios to the weights before the update, and would mask almost every stale sequence.
        It also means none where the clip bounds are thresholds of a divergence.
        """
        loss_mode = actor.policy_loss.loss_mode
        per_sequence = loss_mode in SEQUENCE_LEVEL_LOSSES
        auto = settings.correction is not Correction.NONE and not per_sequence and loss_mode not in DIVERGENCE_LOSSES
        if not {TrustRegion.AUTO: auto, TrustRegion.NONE: False, TrustRegion.MASK: True}[settings.trust_region]:
            return None
        bounds = settings.trust_region_bounds or (actor.clip_ratio_low, actor.clip_ratio_high)
        low, high = (actor.clip_ratio if bound is None else bound for bound in bounds)
        return cls(low, high, per_sequence)

    def outside(
        self, current: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """[B, R] bool, generated tokens that are outside the region.

        Args:
            current, behaviour: [B, R] log-probs. advantages: [B, R]. mask: [B, R], above 0 where the model generated.
        """
        # verl clamps its log-ratios alike, so that no exponential overflows.
        delta = (current - behaviour).clamp(-SAFETY_BOUND, SAFETY_BOUND)
        if self.per_sequence:
            delta, advantages = (
                verl_F.masked_mean(each, mask > 0, axis=-1)[:, None].expand_as(each) for each in (delta, advantages)
            )
        ratio = delta.exp()
        return (mask > 0) & ((ratio > 1 + self.high) & (advantages > 0) | (ratio < 1 - self.low) & (advantages < 0))


def masked_parts(outside: torch.Tensor, advantages: torch.Tensor, age: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return metrics of the masked tokens, each [B, R] bool: all, advantage at most 0, age 0, and age 2 or more.

    Args:
        outside: [B, R] bool. advantages: [B, R].
        age: [B, R] int, version of the weights before the update minus the version of the token.
    """
    parts = {
        "masked": outside,
        "masked_negative": outside & (advantages <= 0),
        "masked_age_0": outside & (age <= 0),
        "masked_age_2_plus": outside & (age >= 2),
    }
    return {f"partial_rollout/trust_region/{name}": part for name, part in parts.items()}


def _newest_of_older(versions: torch.Tensor, version: int) -> torch.Tensor:
    """[B, R] bool, tokens that the weights ``version`` sampled in samples begun by older weights.

    Args:
        versions: [B, R], of each token; below 0 where none was sampled.
    """
    older = ((versions >= 0) & (versions < version)).any(dim=1, keepdim=True)
    return (versions == version) & older


# -- the trainer's side ------------------------------------------------------------------------------------------------


def needs_pass(config: DictConfig) -> bool:
    """Return whether ``config`` needs verl's separate forward pass over the batch for the proximal log-probs.

    Otherwise the forward pass of the update gives them. The separate pass is needed

    * with several updates a batch: later ones start from other weights;
    * for rejection, the KL penalty on rewards and some estimators: they read the log-probs before the update;
    * for normalised weights: they need the whole batch, and the loss sees one micro-batch;
    * with LoRA's dropout (Megatron's; under FSDP only a loaded adapter may have one): it would change the update's
      log-probs;
    * with router replay R2: it records its routes in the pass.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.rollout_correction
    return bool(
        actor.ppo_epochs != 1
        or actor.ppo_mini_batch_size < config.data.train_batch_size
        or correction.rollout_rs is not None
        or correction.rollout_is_batch_normalize
        or algorithm.use_kl_in_reward
        or algorithm.adv_estimator in _READS_OLD_LOG_PROBS
        or OmegaConf.select(config, "actor_rollout_ref.model.lora.dropout")
        or OmegaConf.select(config, "actor_rollout_ref.model.lora_adapter_path")
        or OmegaConf.select(config, f"actor_rollout_ref.{ROUTER_REPLAY}") == "R2"
    )


@dataclass(frozen=True, slots=True)
class ProximalPolicy:
    """The source of a run's proximal log-probs, and the weights of its tokens. Trainer and loss share one."""

    from_update: bool
    """whether the update's forward pass gives the proximal log-probs, and the loss makes the weights"""
    granularity: str | None
    """``rollout_correction.rollout_is``; None for no weights"""
    threshold: Any
    """``rollout_correction.rollout_is_threshold``"""
    check_every: int = 10
    """with ``from_update``, the pass over the batch still runs in steps 1, 1 + check_every, 1 + 2 * check_every, ..."""

    @classmethod
    def of(cls, config: DictConfig, settings: PartialRolloutConfig) -> ProximalPolicy:
        """Derive it from a checked config. noPR keeps verl's own loss and pass: no weights, ``from_update=False``."""
        if not settings.enable:
            return cls(from_update=False, granularity=None, threshold=None)
        correction = config.algorithm.rollout_correction
        return cls(not needs_pass(config), correction.rollout_is, correction.rollout_is_threshold)

    def recomputes(self, step: int) -> bool:
        """Whether step ``step``, of 1, 2, ..., runs the pass over the batch."""
        # Step 1 is among them: a wrong proximal policy shows before much is trained.
        return not self.from_update or (step - 1) % self.check_every == 0


def logged(data: dict[str, Any]) -> dict[str, Any]:
    """Return a step's metrics: strip the loss's prefix, and add the effective sample size and the mean KV gap."""
    found = {key.removeprefix(REPORTED_AS): value for key, value in data.items()}
    if (square := found.pop(WEIGHT_SQUARE, None)) is not None:
        # Kish's (sum w)^2 / (n sum w^2). verl averages micro-batches, so rounding can lift it slightly above 1.
        share = min(1.0, found[WEIGHT_MEAN] ** 2 / square) if square > 0 else 0.0
        found["rollout_corr/rollout_is_eff_sample_size"] = share
    gap, share = found.pop(KV_GAP, 0.0), found.pop(KV_GAP_SHARE, 0.0)
    if share:
        found["partial_rollout/mismatch/kv_gap_mean"] = gap / share
    return found
