"""The trainer under verl's v1: ``PPOTrainerSync``, whose batches come from the run's rounds (``training/v1/rounds.py``).

verl's ``fit`` runs unchanged, under PR and noPR. noPR is verl's trainer mode ``sync``; the recipe's manager records its
batches. The trainer shares ``TrainerRun`` with ``PartialRolloutRayPPOTrainer``, and validates as ``RayPPOTrainer``
does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.checkpoint_engine import CheckpointEngineManager
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import need_reward_model
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager

from recipe.partial_rollout.training.loss import VERSION
from recipe.partial_rollout.training.trainer_run import TrainerRun
from recipe.partial_rollout.training.v1.rounds import DataEndedError, RoundBuffer, give_versions


class _WholeValidation:
    """Validates as ``RayPPOTrainer`` does. v1 validates through TransferQueue, and counts a failed sample as wrong."""

    _validate = RayPPOTrainer._validate
    _val_metrics_update = RayPPOTrainer._val_metrics_update
    _get_gen_batch = RayPPOTrainer._get_gen_batch


class PartialRolloutPPOTrainer(TrainerRun, _WholeValidation, PPOTrainerSync):
    """verl's v1 trainer, with batches from ``RoundBuffer``; ``ours`` are the arguments of ``TrainerRun``."""

    replay_buffer: Any

    def __init__(self, config: DictConfig, **ours: Any) -> None:
        super().__init__(config, **ours)
        # verl neither saves TransferQueue nor restores it: nothing in it outlives a step.
        self.trainer_mode = "sync"
        self.use_rm = need_reward_model(config)

    def _build_replay_buffer(self) -> None:
        """Build none yet: ``fit`` does, once there is a manager to make batches."""

    def _init_dataloader(self) -> None:
        # With dynamic sampling verl's loader would have batches of one prompt, and epochs without a remainder.
        algorithm = self.config.algorithm
        filters, algorithm.filter_groups = algorithm.get("filter_groups"), None
        super()._init_dataloader()
        algorithm.filter_groups = filters
        self._offer(self.train_dataloader)

    def _setup(self) -> None:
        """Set up as verl does. Separate: make engines on their own devices, and the configured checkpoint engine."""
        # verl's ``_setup`` asks for it before it makes the workers.
        self._enable_hybrid_replicas = not self.settings.separate
        super()._setup()
        if self.settings.separate:
            self.llm_server_manager: Any = LLMServerManager.create(config=self.config)
            self.checkpoint_manager: Any = CheckpointEngineManager(
                config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
                actor_wg=self.actor_rollout_wg,
                replicas=self.llm_server_manager.get_replicas(),
            )

    def on_init_end(self) -> None:
        """Send no weights yet: the run's parts are not connected."""

    def fit(self, agent_loop_manager: Any) -> None:
        """Connect the run's parts to ``agent_loop_manager``, and let ``run_fit`` call verl's ``fit``.

        A ``RoundBuffer`` takes the place of the replay buffer.
        """
        self.async_rollout_manager = agent_loop_manager
        # v1 makes the agent-loop manager last and hands it to ``fit``: workers and replicas exist only now.
        self._connect(agent_loop_manager)
        samples = self.config.actor_rollout_ref.rollout.n
        self.replay_buffer = RoundBuffer(agent_loop_manager, self.train_dataloader, samples)
        self.run_fit(self._loop)

    def _loop(self) -> None:
        self._load_data()
        self.checkpoint_manager.update_weights(self.global_steps)
        try:
            super().fit(self.async_rollout_manager)
        except DataEndedError:
            self._shutdown_dump_executor()

    def prepare_step(self) -> dict:
        """Choose whether the pass over the batch runs. ``RoundBuffer.sample`` makes the batch later."""
        self._choose_pass()
        return {}

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Return m: verl adds filler rows until a batch has a multiple of m rows, the same for all ranks and updates.

        verl's own m is a mini-batch. A step with a few more rows than usual would then have an extra update on those
        rows and fillers alone.
        """
        rollout, actor = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.actor
        updates = [self.config.data.train_batch_size // part.ppo_mini_batch_size for part in self._updated]
        # A micro-batch of so many rows divides the mini-batches of the config.
        size = dp_size if actor.use_dynamic_bsz else actor.ppo_mini_batch_size * rollout.n
        return math.lcm(size, rollout.n) * math.lcm(*updates)

    @property
    def _updated(self) -> list[Any]:
        """The config of each model that is updated."""
        return [self.config.actor_rollout_ref.actor, *([self.config.critic] if self.use_critic else [])]

    @contextmanager
    def _as_many_updates(self, part: Any, batch: KVBatchMeta) -> Iterator[None]:
        """Have verl divide ``batch`` into the configured number of mini-batches, however many rows its samples have."""
        size = part.ppo_mini_batch_size
        samples = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        # verl's update reads it anew each time.
        part.ppo_mini_batch_size = len(batch) * size // samples
        try:
            yield
        finally:
            part.ppo_mini_batch_size = size

    def _balance_batch(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> KVBatchMeta:
        batch = super()._balance_batch(batch, *args, **kwargs)
        give_versions(batch)
        return batch

    def _compute_reward_colocate(self, batch: Any, metrics: dict | None = None) -> Any:
        """Score ``batch`` by a colocated reward model.

        A validation's batch is a ``DataProto``, scored as by ``RayPPOTrainer``. A training batch is a list of keys: its
        rows are put into TransferQueue again, with their scores.
        """
        score = super()._compute_reward_colocate
        if isinstance(batch, DataProto):
            return score(batch)
        self.replay_buffer.score(score)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.settings.enable:
            assert batch.extra_info is not None
            # v1's update knows a batch by its keys; this travels beside them to the loss.
            batch.extra_info[VERSION] = self.global_steps - 1
        with self._as_many_updates(self.config.actor_rollout_ref.actor, batch):
            return super()._update_actor(batch, metrics)

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._as_many_updates(self.config.critic, batch):
            return super()._update_critic(batch, metrics)
