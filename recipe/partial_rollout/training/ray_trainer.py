"""The trainer: verl's ``RayPPOTrainer``, whose batches come from partial rollout.

verl's ``fit`` runs unchanged, in both arms::

    SlotLoader -> N empty slots -> PartialRolloutAgentLoopManager.generate_sequences (Driver.next_batch) -> full batch
      -> log-probs, reward, advantage, update (verl) -> weight sync (RecipeCheckpointManager), which ends the step

What belongs to the run and not to a trainer is its ``RunSession``; what every trainer of a run does is ``TrainerRun``. With
``partial_rollout.enable=False`` loader, manager and batches are verl's own.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from recipe.partial_rollout.config.settings import engine_devices
from recipe.partial_rollout.training.colocated_reward import score_batch
from recipe.partial_rollout.training.trainer_run import TrainerRun
from verl_ext.standalone_engines import standalone_engines


class PartialRolloutRayPPOTrainer(TrainerRun, RayPPOTrainer):
    """``RayPPOTrainer`` whose batches come from the driver; its arguments are ``TrainerRun``'s."""

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        super()._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        self._offer(self.train_dataloader)

    def init_workers(self) -> None:
        """As verl's; then connect the recipe's parts to the replicas and workers that it made."""
        alone = engine_devices(self.config) > 0
        with standalone_engines() if alone else nullcontext():
            super().init_workers()
        self._connect(self.async_rollout_manager)

    def fit(self) -> None:
        """As ``play``."""
        self.play(super().fit)

    def _load_checkpoint(self) -> None:
        self._load_trainer(super()._load_checkpoint)
        self._load_data()

    def _compute_reward_colocate(self, batch: DataProto) -> DataProto:
        return score_batch(self.reward_loop_manager, batch, self.settings)

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float | None]:
        if not self.proximal.recomputes(self.global_steps):
            return self.proximal.stand_in(batch), 0.0
        return super()._compute_old_log_prob(batch)

    def _update_actor(self, batch: DataProto) -> DataProto:
        if self.settings.enable:
            self.proximal.instruct(batch.meta_info, self.global_steps)
            if "rollout_log_probs" not in batch.batch:
                batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"]
        return super()._update_actor(batch)
