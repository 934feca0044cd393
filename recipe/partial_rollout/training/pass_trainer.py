"""verl's trainer with the recipe's forward passes before the update: left out, run early, or verl's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from recipe.partial_rollout.engine.kept_kv import kv_gap
from recipe.partial_rollout.training.early_passes import OLD, REFERENCE, VALUES, EarlyPasses

if TYPE_CHECKING:
    from recipe.partial_rollout.config.settings import PartialRolloutConfig
    from recipe.partial_rollout.training.proximal import ProximalPolicy


class PassTrainer(RayPPOTrainer):
    """``RayPPOTrainer`` that knows where the results of a batch's forward passes come from."""

    settings: PartialRolloutConfig
    proximal: ProximalPolicy
    early_passes: EarlyPasses | None = None
    """made with the workers; None: passes run on the whole batch"""
    _measured: dict[str, float]
    """metrics of the step, without the ``partial_rollout/`` prefix"""

    def _early(self, name: str, batch: DataProto) -> DataProto | None:
        """Results of a pass that ran early; None: it does not."""
        if self.early_passes is None or name not in self.early_passes:
            return None
        return self.early_passes.of_batch(name, batch, self.global_steps)

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float | None]:
        if self.settings.enable and not self.proximal.recomputes(self.global_steps):
            return self.proximal.stand_in(batch), 0.0
        proximal, flops = self._early(OLD, batch), None
        if proximal is None:
            proximal, flops = super()._compute_old_log_prob(batch)
        if self.settings.enable:
            self._measured = kv_gap(batch.batch, proximal.batch["old_log_probs"], self.global_steps - 1)
        return proximal, flops

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        early = self._early(REFERENCE, batch)
        return super()._compute_ref_log_prob(batch) if early is None else early

    def _compute_values(self, batch: DataProto) -> DataProto:
        early = self._early(VALUES, batch)
        return super()._compute_values(batch) if early is None else early
