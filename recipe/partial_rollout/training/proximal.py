"""Where the log-probs of the weights before the update come from: verl's pass over the batch, or the update itself.

Where a batch is trained in one update, the update's forward pass runs on these weights: the loss has the proximal
log-probs, ``pi_theta`` before it moves, and verl's pass over the batch computes them a second time.
That pass is left out if nothing else needs it, except in step 1 and every ``CHECK_EVERY``-th after it: these log what only
the pass gives, and the difference that it makes, ``proximal/error``.

In a step without the pass verl's ``fit`` gets the behaviour log-probs in place of the proximal ones. Metrics that it
derives from them are left out; the loss gives those that the recipe reads (``training/loss.py``), under verl's names. The
entropy, another run over the logits, is among them only where it is in the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.protocol import DataProto

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.training import loss

CHECK_EVERY = 10
"""steps between two that run the pass all the same"""
_READS_OLD_LOG_PROBS = ("optimal_token_baseline", "tir_optimal_token_baseline")
_DERIVED = ("actor/entropy", "perf/mfu/actor_infer")
_DERIVED_PREFIXES = ("rollout_corr/", "training/rollout_")


def needs_pass(config: DictConfig) -> bool:
    """Whether a composed config needs verl's pass over the batch, because the update's own does not do.

    Later updates of a batch start from other weights. Rejection, the KL penalty on rewards and some estimators read the
    log-probs; normalised weights are those of the whole batch, of which the loss sees one micro-batch; LoRA's dropout
    would be in the update's.
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
    )


class ProximalPolicy:
    """Decides where a step's proximal log-probs come from.

    Args:
        config: of the run; checked, or one of noPR.
    """

    def __init__(self, config: DictConfig, settings: PartialRolloutConfig) -> None:
        self.from_update = settings.enable and not needs_pass(config)
        """whether the update's forward pass gives them"""
        self._correction = config.algorithm.rollout_correction

    def recomputes(self, step: int) -> bool:
        """Whether step ``step``, of 1, 2, ..., runs the pass over the batch."""
        return not self.from_update or (step - 1) % CHECK_EVERY == 0

    def stand_in(self, batch: DataProto) -> DataProto:
        """Stands in for recomputed log-probs (and entropies) [B, R] in verl's ``fit``, in a step without the pass.

        ``batch`` is without ``rollout_log_probs`` until its update: verl would compare the two, which are the same, on the
        driver (half a second of a step with 256 responses of up to 8,192 tokens).
        """
        behaviour = batch.batch.pop("rollout_log_probs")
        return DataProto.from_single_dict({"old_log_probs": behaviour, "entropys": torch.zeros_like(behaviour)})

    def instruct(self, info: dict[str, Any], step: int) -> None:
        """Tell the loss what to do, in ``info``, the non-tensor data of a batch."""
        check = self.recomputes(step)
        info[loss.ORDER] = loss.UpdateOrder(
            version=step - 1,
            from_update=self.from_update,
            check=check,
            level=self._correction.rollout_is,
            threshold=self._correction.rollout_is_threshold,
        )

    def metrics(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """``data`` of step ``step`` without metrics of the stand-in; the loss's have the names by which they are logged."""
        drop = not self.recomputes(step)
        logged = {
            key.removeprefix(loss.REPORTED_AS): value
            for key, value in data.items()
            if not (drop and (key in _DERIVED or key.startswith(_DERIVED_PREFIXES)))
        }
        if (square := logged.pop(loss.WEIGHT_SQUARE, None)) is not None:
            # Kish's (sum w)^2 / (n sum w^2). verl averages micro-batches, so rounding can lift it slightly above 1.
            share = min(1.0, logged[loss.WEIGHT_MEAN] ** 2 / square) if square > 0 else 0.0
            logged["rollout_corr/rollout_is_eff_sample_size"] = share
        gap, share = logged.pop(loss.KV_GAP, 0.0), logged.pop(loss.KV_GAP_SHARE, 0.0)
        if share:
            logged["partial_rollout/mismatch/kv_gap_mean"] = gap / share
        return logged
