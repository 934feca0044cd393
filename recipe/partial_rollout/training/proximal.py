"""The trainer's side of the proximal policy, whose weights are those before the update.

Where a batch is trained in one update, the update's forward pass runs on these weights: the loss has the proximal
log-probs, ``pi_theta`` before it moves, and verl's pass over the batch computes them a second time.
``partial_rollout.proximal=auto`` leaves that pass out if nothing else needs it (``training/pass_reader.py``), except in
every ``proximal_check_every``-th step.

In a step without the pass verl's ``fit`` gets the behaviour log-probs in place of the proximal ones. Metrics that it
derives from them are left out; the loss gives the entropy and those that the recipe reads (``training/loss.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from verl.protocol import DataProto

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.behaviour_weights import effective_sample_size
from recipe.partial_rollout.training.pass_reader import leaves_pass_out
from verl_ext import reported_entropy

_ENTROPY = "actor/entropy"
_DERIVED = (_ENTROPY, "perf/mfu/actor_infer")
_DERIVED_PREFIXES = ("rollout_corr/", "training/rollout_")


class ProximalPolicy:
    """Decides where a step's proximal log-probs come from.

    Args:
        from_update: whether the update's forward pass gives them.
        check_every: steps between two that run the pass over the batch all the same; 0: never.
        rollout_correction: verl's ``algorithm.rollout_correction``.
        most_rows: responses that one update trains at most.
    """

    def __init__(self, *, from_update: bool, check_every: int, rollout_correction: Any, most_rows: int) -> None:
        self.from_update = from_update
        self._check_every = check_every
        self._correction = rollout_correction
        self._most_rows = most_rows

    @classmethod
    def of(cls, config: DictConfig, settings: PartialRolloutConfig) -> ProximalPolicy:
        """What the settings ask for; ``config`` has been checked, or is one of noPR."""
        return cls(
            from_update=leaves_pass_out(config, settings),
            check_every=settings.proximal_check_every,
            rollout_correction=config.algorithm.rollout_correction,
            most_rows=config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n,
        )

    def recomputes(self, step: int) -> bool:
        """Whether step ``step`` runs the pass over the batch."""
        return not self.from_update or (self._check_every > 0 and step % self._check_every == 0)

    def stand_in(self, batch: DataProto) -> DataProto:
        """Stands in for recomputed log-probs (and entropies) [B, R] in verl's ``fit``, in a step without the pass."""
        behaviour = batch.batch["rollout_log_probs"]
        return DataProto.from_single_dict({"old_log_probs": behaviour.clone(), "entropys": torch.zeros_like(behaviour)})

    def instruct(self, batch: DataProto, step: int) -> None:
        """Tell the loss what to do, in ``batch.meta_info``.

        Raises:
            RuntimeError: one update cannot train the batch, whose later updates would start from other weights.
        """
        if not self.from_update:
            return
        if len(batch) > self._most_rows:
            raise RuntimeError(
                f"a batch of {len(batch)} responses is trained in more than one update "
                f"(actor.ppo_mini_batch_size * rollout.n = {self._most_rows}): set partial_rollout.proximal=recompute"
            )
        batch.meta_info[loss.PROXIMAL_FROM_UPDATE] = True
        batch.meta_info[loss.PROXIMAL_CHECK] = self.recomputes(step)
        batch.meta_info[reported_entropy.ASKED] = not self.recomputes(step)
        batch.meta_info[loss.WEIGHT_LEVEL] = self._correction.rollout_is
        batch.meta_info[loss.WEIGHT_THRESHOLD] = self._correction.rollout_is_threshold

    def metrics(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """``data`` of step ``step`` without metrics of the stand-in, with the loss's metrics under ``partial_rollout/``."""
        drop = not self.recomputes(step)
        kept, made = {}, {}
        for key, value in data.items():
            if drop and (key in _DERIVED or key.startswith(_DERIVED_PREFIXES)):
                continue
            if key.startswith(loss.METRICS_PREFIX):
                made[key.removeprefix(loss.METRICS_PREFIX)] = value
            else:
                kept[key] = value
        for divergence in (loss.KL, loss.K3):
            if (value := made.pop(divergence, None)) is not None:
                kept.setdefault(f"rollout_corr/{divergence}", value)
        if (entropy := made.pop(loss.ENTROPY, None)) is not None:
            kept.setdefault(_ENTROPY, entropy)
        if (square := made.pop(loss.WEIGHT_SQUARE, None)) is not None:
            made["behaviour_weight/ess"] = effective_sample_size(made[loss.WEIGHT_MEAN], square)
        share, gap = made.pop(loss.KV_GAP_SHARE, 0.0), made.pop(loss.KV_GAP, 0.0)
        if share:
            made["mismatch/kv_gap_mean"] = gap / share
        return kept | {f"partial_rollout/{key}": value for key, value in made.items()}
