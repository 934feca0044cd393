"""The trainer's side of the proximal policy: recomputed once per batch, or left to the loss (``corrected_ppo_loss``).

With ``partial_rollout.proximal=interpolate`` the forward pass over the batch is skipped, except in every
``proximal_check_every``-th step, which measures the interpolation's error. If it is skipped, verl's ``fit`` gets the
behaviour log-probs in place of the proximal ones; metrics derived from them are meaningless and are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.protocol import DataProto

from recipe.partial_rollout.config.choices import Proximal
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.behaviour_weights import effective_sample_size

_DERIVED = ("actor/entropy", "perf/mfu/actor_infer")
_DERIVED_PREFIXES = ("rollout_corr/", "training/rollout_")


class ProximalPolicy:
    """Decides where a step's proximal log-probs come from.

    Args:
        source: ``partial_rollout.proximal``.
        check_every: steps between two measurements of the interpolation's error; 0: never.
        rollout_correction: verl's ``algorithm.rollout_correction``.
    """

    def __init__(self, source: Proximal, check_every: int, rollout_correction: Any) -> None:
        self._source = source
        self._check_every = check_every
        self._correction = rollout_correction

    @property
    def interpolates(self) -> bool:
        return self._source is Proximal.INTERPOLATE

    def recomputes(self, step: int) -> bool:
        """Whether step ``step`` runs the forward pass."""
        return not self.interpolates or (self._check_every > 0 and step % self._check_every == 0)

    def stand_in(self, batch: DataProto) -> DataProto:
        """Stands in for recomputed log-probs (and entropies) [B, R] in verl's ``fit``, in a step without the pass."""
        behaviour = batch.batch["rollout_log_probs"]
        return DataProto.from_single_dict({"old_log_probs": behaviour.clone(), "entropys": torch.zeros_like(behaviour)})

    def instruct(self, batch: DataProto, step: int) -> None:
        """Tell the loss what to interpolate, in ``batch.meta_info``."""
        if not self.interpolates:
            return
        batch.meta_info[loss.PROXIMAL_VERSION] = step - 1
        batch.meta_info[loss.PROXIMAL_CHECK] = self.recomputes(step)
        batch.meta_info[loss.WEIGHT_LEVEL] = self._correction.rollout_is
        batch.meta_info[loss.WEIGHT_THRESHOLD] = self._correction.rollout_is_threshold

    def metrics(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """``data`` of step ``step`` without metrics of the stand-in, with the loss's metrics under ``partial_rollout/``."""
        drop = not self.recomputes(step)
        kept = {}
        for key, value in data.items():
            if drop and (key in _DERIVED or key.startswith(_DERIVED_PREFIXES)):
                continue
            kept[key.removeprefix("actor/") if key.startswith(loss.METRICS_PREFIX) else key] = value
        if (square := kept.pop(f"partial_rollout/{loss.WEIGHT_SQUARE}", None)) is not None:
            mean = kept[f"partial_rollout/{loss.WEIGHT_MEAN}"]
            kept["partial_rollout/behaviour_weight/ess"] = effective_sample_size(mean, square)
        return kept
