"""Builds verl's trainer parts from the config and runs them: verl's ``BaseTaskRunner`` with our trainer."""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.main_ppo_v0 import BaseTaskRunner
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler, need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import collate_fn

from recipe.partial_rollout.training.ray_trainer import PartialRolloutRayPPOTrainer
from recipe.partial_rollout.training.worker_group import with_master_ports


def start_ray(config: DictConfig) -> None:
    """``ray.init`` with verl's runtime environment and the config's ``ray_kwargs.ray_init``, unless it is up."""
    if ray.is_initialized():
        return
    options: Any = OmegaConf.to_container(config.ray_kwargs.get("ray_init", {}), resolve=True)
    environment: Any = OmegaConf.merge(get_ppo_ray_runtime_env(config), options.pop("runtime_env", None) or {})
    ray.init(runtime_env=OmegaConf.to_container(environment), **options)


class TaskRunner(BaseTaskRunner):
    """Loads datasets and tokenizer at construction, which needs no Ray, and builds the rest in ``train``."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__()
        self.config = config
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        self.tokenizer, self.processor = model.tokenizer, model.processor
        self.train_dataset = self._dataset("train")
        self.val_dataset = self._dataset("val")

    def _dataset(self, split: str) -> Any:
        data = self.config.data
        return create_rl_dataset(
            data[f"{split}_files"],
            data,
            self.tokenizer,
            self.processor,
            is_train=split == "train",
            max_samples=data.get(f"{split}_max_samples", -1),
        )

    def train(self) -> None:
        """Make the workers and train to the last step."""
        config = self.config
        _, worker_group_class = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_resource_pool(config)
        validate_config(
            config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
        trainer = PartialRolloutRayPPOTrainer(
            config=config,
            tokenizer=self.tokenizer,
            processor=self.processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=with_master_ports(worker_group_class),
            train_dataset=self.train_dataset,
            val_dataset=self.val_dataset,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, self.train_dataset),
            device_name=config.trainer.device,
        )
        trainer.init_workers()
        trainer.fit()
