"""Builds verl's trainer parts from the config and runs them: verl's ``BaseTaskRunner`` with our trainer."""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray.util import list_named_actors
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.main_ppo_v0 import BaseTaskRunner
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.import_utils import load_class_from_fqn

from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.preflight import Checked
from recipe.partial_rollout.preflight.inputs import check_cluster, ray_options
from recipe.partial_rollout.records.run_log import NAME as LOG
from recipe.partial_rollout.rollout.run_files import RunFiles
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.terminal import say
from recipe.partial_rollout.training.trainer_run import PartialRolloutRayPPOTrainer


def start_ray(config: DictConfig) -> None:
    """Call ``ray.init`` with verl's runtime environment and ``ray_options``, unless Ray is initialized."""
    if ray.is_initialized():
        return
    options = ray_options(config)
    environment: Any = OmegaConf.merge(get_ppo_ray_runtime_env(config), options.pop("runtime_env", None) or {})
    ray.init(runtime_env=OmegaConf.to_container(environment), **options)


class TaskRunner(BaseTaskRunner):
    """Makes the workers and trains, with what the checks have loaded.

    Args:
        files: the run's directory and checkpoints.
    """

    def __init__(self, config: DictConfig, files: RunFiles, checked: Checked) -> None:
        super().__init__()
        self.config, self.files, self.checked = config, files, checked
        self.ours: dict[str, Any] = {"settings": checked.settings, "files": files}
        """keyword arguments that ``TrainerRun`` takes beside verl's"""

    def train(self) -> None:
        """Start Ray, make the workers, train to the last step, end Ray. If the last step is done, start nothing.

        Raises:
            ConfigError: Ray has fewer devices or CPUs than trainer and engines need.
        """
        files, log = self.files, self.files.directory / LOG
        over = files.trains and files.completed_step >= self.checked.last_step
        # A run that was killed after its last checkpoint starts once more, to note in its log that it is complete.
        if over and (not log.exists() or b'"complete":true' in log.read_bytes()[-200:]):
            say(f"nothing to do: {files.checkpoints.chosen} is the checkpoint of the last step")
            return
        try:
            # ``ray.init`` forks and installs signal handlers: a signal that came within it would be lost.
            with StopSignals.of_process().behind():
                start_ray(self.config)
            check_cluster(self.config, ray.cluster_resources())
            self._train()
        finally:
            ray.shutdown()

    def _train(self) -> None:
        config = self.config
        if config.trainer.use_v1:
            self._train_v1()
            return
        self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_resource_pool(config)
        assert self.checked.datasets is not None
        train, val = self.checked.datasets
        trainer = PartialRolloutRayPPOTrainer(
            config=config,
            tokenizer=self.checked.tokenizer,
            processor=self.checked.processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            train_dataset=train,
            val_dataset=val,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, train),
            device_name=config.trainer.device,
            **self.ours,
        )
        trainer.init_workers()
        trainer.fit()

    def _train_v1(self) -> None:
        """Train with verl's v1 trainer, as its ``TaskRunnerV1`` does, but in this process."""
        import transfer_queue as tq

        from recipe.partial_rollout.training.v1.trainer import PartialRolloutPPOTrainer

        config = self.config
        config.transfer_queue.enable = True
        if {"name": "TransferQueueController", "namespace": "transfer_queue"} in list_named_actors(all_namespaces=True):
            raise fail("trainer.use_v1", True, "must be False: another run uses TransferQueue in this Ray cluster")
        tq.init(config.transfer_queue)
        try:
            trainer: Any = PartialRolloutPPOTrainer(config, **self.ours)  # pyright: ignore[reportAbstractUsage]
            trainer.init()
            manager_class: Any = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class)
            manager = manager_class.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            trainer.fit(manager)
        finally:
            tq.close()
