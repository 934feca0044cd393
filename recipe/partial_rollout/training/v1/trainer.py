"""The trainer under verl's v1: ``PPOTrainerSync``, whose batches come from the run's rounds (``training/v1/rounds.py``).

verl's ``fit`` runs unchanged, in both arms. noPR is verl's ``sync``, whose batches the recipe's manager records. What the
trainer shares with ``PartialRolloutRayPPOTrainer`` is ``TrainerRun``.
"""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig
from torchdata.stateful_dataloader import StatefulDataLoader
from transfer_queue import KVBatchMeta
from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1 import PPOTrainerSync, trainer_base
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.rollout.llm_server import LLMServerManager

from recipe.partial_rollout.config.settings import engine_devices
from recipe.partial_rollout.training.colocated_reward import score_batch
from recipe.partial_rollout.training.trainer_run import TrainerRun
from recipe.partial_rollout.training.v1.rounds import TRAIN, DataEndedError, RoundBuffer


class PartialRolloutPPOTrainer(TrainerRun, PPOTrainerSync):
    """verl's v1 trainer with the batches of a run; ``ours`` are ``TrainerRun``'s."""

    tracking_of = trainer_base
    replay_buffer: Any

    def __init__(self, config: DictConfig, **ours: Any) -> None:
        super().__init__(config, **ours)
        # verl neither saves TransferQueue nor restores it: nothing in it outlives a step.
        self.trainer_mode = "sync"

    def _build_replay_buffer(self) -> Any:
        return RoundBuffer(self.config)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        data, loader = self.config.data, self.train_dataloader
        if loader.batch_size != data.train_batch_size:
            # With dynamic sampling verl's has batches of one prompt, and epochs without a remainder.
            loader = StatefulDataLoader(
                dataset=self.train_dataset,
                batch_size=data.train_batch_size,
                num_workers=data.dataloader_num_workers,
                drop_last=True,
                collate_fn=collate_fn,
                sampler=create_rl_sampler(data, self.train_dataset),
            )
        self.train_dataloader = loader
        self._offer(loader)

    def _setup(self) -> None:
        """As verl's; separate engines have devices of their own and the transfer that the config asks for."""
        alone = engine_devices(self.config) > 0
        self._enable_hybrid_replicas = not alone
        super()._setup()
        if alone:
            self.llm_server_manager: Any = LLMServerManager.create(config=self.config)
            self.checkpoint_manager: Any = CheckpointEngineManager(
                config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
                actor_wg=self.actor_rollout_wg,
                replicas=self.llm_server_manager.get_replicas(),
            )

    def on_init_end(self) -> None:
        """The weights are sent once the run's parts are connected."""

    def fit(self, agent_loop_manager: Any) -> None:
        """As ``play``; ``agent_loop_manager`` is the arm's, of ``training/agent_loop_manager.py``."""
        self._connect(agent_loop_manager)
        self.replay_buffer.connect(agent_loop_manager, self.train_dataloader)
        self.play(self._loop)

    def _loop(self) -> None:
        self._load_data()
        self.checkpoint_manager.update_weights(self.global_steps)
        try:
            super().fit(self.replay_buffer)  # type: ignore[arg-type]
        except DataEndedError:
            self._shutdown_dump_executor()

    def prepare_step(self) -> dict:
        """Nothing: the batch is made when it is asked for."""
        return {}

    def _load_checkpoint(self) -> None:
        self.global_steps = 0
        self._load_trainer(super()._load_checkpoint)

    def _compute_reward_colocate(self, batch: KVBatchMeta, metrics: dict | None = None) -> KVBatchMeta:
        self.replay_buffer.score(lambda padded: score_batch(self.reward_loop_manager, padded, self.settings))
        return batch

    def _val_metrics_update(self, *args: Any, expected_acc_counts: Any = None, **kwargs: Any) -> dict[str, Any]:
        """As ``RayPPOTrainer``'s: v1 counts a failed sample as wrong, here it counts in no mean."""
        return super()._val_metrics_update(*args, **kwargs)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.proximal.recomputes(self.global_steps):
            return super()._compute_old_log_prob(batch, metrics)
        data = tq.kv_batch_get(batch.keys, TRAIN, select_fields=["rollout_log_probs"])
        data["old_log_probs"] = data.pop("rollout_log_probs")
        tq.kv_batch_put(keys=batch.keys, partition_id=TRAIN, fields=data)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.settings.enable:
            assert batch.extra_info is not None
            self.proximal.instruct(batch.extra_info, self.global_steps)
        return super()._update_actor(batch, metrics)
