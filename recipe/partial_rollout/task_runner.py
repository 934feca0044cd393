"""Builds verl's trainer parts from the config and runs them: verl's ``BaseTaskRunner`` with our trainer."""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import urlsplit

import ray
from omegaconf import DictConfig, OmegaConf
from ray._private import services
from ray.util import list_named_actors
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.main_ppo_v0 import BaseTaskRunner
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.import_utils import load_class_from_fqn

from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.preflight.inputs import check_cluster
from recipe.partial_rollout.preflight.rows import dataset_of
from recipe.partial_rollout.rollout.session import RunSession
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.training.trainer_run import PartialRolloutRayPPOTrainer
from recipe.partial_rollout.waits import one_line

_SIZES = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
"""options of ``ray.init`` that give a Ray of the run's own its size, and which Ray refuses for a cluster that is joined"""


_PROBE_S = 2.0
_CLIENT_PORT = 10001
"""Ray's, for ``ray://HOST``"""


def _sizes(options: dict[str, Any]) -> list[str]:
    return [name for name in _SIZES if options.get(name) is not None]


def _ray_options(config: DictConfig) -> dict[str, Any]:
    """``ray_kwargs.ray_init``; its address is ``local`` where it sizes Ray and nobody names a cluster."""
    options: Any = OmegaConf.to_container(config.ray_kwargs.get("ray_init", {}), resolve=True)
    named = options.get("address") or os.environ.get("RAY_ADDRESS")
    return {**options, "address": "local"} if _sizes(options) and named in (None, "", "local") else options


def _accepts(address: str, port: int) -> bool:
    """Whether something at ``address`` takes a TCP connection within ``_PROBE_S``."""
    try:
        with socket.create_connection((address, port), _PROBE_S):
            return True
    except OSError:
        return False


def check_ray_address(config: DictConfig) -> None:
    """Check that the Ray cluster that a run would join takes connections: Ray itself tries for over a minute.

    Raises:
        ConfigError: none within two seconds, or the address is malformed.
    """
    options = _ray_options(config)
    key, address, named = "ray_kwargs.ray_init.address", options.get("address"), os.environ.get("RAY_ADDRESS")
    if address in (None, "", "auto") and named:
        key, address = "RAY_ADDRESS", named
    scheme, is_url, at = str(address or "").rpartition("://")
    # Ray asks a plugin about other schemes.
    if ray.is_initialized() or address == "local" or scheme not in ("", "ray"):
        return
    allowed = "HOST:PORT of a Ray cluster that answers, auto for one of this machine, or local for a new one"
    try:
        if address in (None, "", "auto"):
            at = services.canonicalize_bootstrap_address(address or None, options.get("_temp_dir"))  # type: ignore[arg-type]
        if not at:
            return
        parts = urlsplit(f"//{at}")
        host, port = parts.hostname, parts.port or (_CLIENT_PORT if is_url else None)
    except (ValueError, OSError) as error:
        raise fail(key, address, f"{allowed} ({one_line(error)})") from error
    if not (host and port and _accepts(host, port)):
        raise fail(key, address, f"{allowed}; nothing answers at {at} within {_PROBE_S:g} s")


def start_ray(config: DictConfig) -> None:
    """``ray.init`` with verl's runtime environment and the config's ``ray_kwargs.ray_init``, unless it is up.

    A cluster that is named by ``RAY_ADDRESS`` or ``ray_init.address`` is joined, and keeps its own resources. Otherwise a
    config that sizes Ray gets a Ray of its own, and not another one that happens to run on this machine.
    """
    if ray.is_initialized():
        return
    options = _ray_options(config)
    sizes, address = _sizes(options), options.get("address") or os.environ.get("RAY_ADDRESS")
    if sizes and address != "local":
        print(f"joining Ray at {address}: {', '.join(sizes)} of ray_kwargs.ray_init do not apply to it")
        options = {name: value for name, value in options.items() if name not in sizes}
    environment: Any = OmegaConf.merge(get_ppo_ray_runtime_env(config), options.pop("runtime_env", None) or {})
    ray.init(runtime_env=OmegaConf.to_container(environment), **options)


class TaskRunner(BaseTaskRunner):
    """Loads datasets and tokenizer at construction, which needs no Ray, and builds the rest in ``train``.

    Args:
        session: the run, of ``config``.
    """

    def __init__(self, config: DictConfig, session: RunSession) -> None:
        super().__init__()
        self.config, self.session = config, session
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        self.tokenizer, self.processor = model.tokenizer, model.processor
        self.train_dataset = dataset_of(config, "train", self.tokenizer, self.processor)
        self.val_dataset = dataset_of(config, "val", self.tokenizer, self.processor)

    def train(self) -> None:
        """Start Ray, make the workers, train to the last step, end Ray.

        Raises:
            ConfigError: Ray has fewer devices or CPUs than trainer and engines need.
        """
        try:
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
        trainer = PartialRolloutRayPPOTrainer(
            config=config,
            tokenizer=self.tokenizer,
            processor=self.processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            train_dataset=self.train_dataset,
            val_dataset=self.val_dataset,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, self.train_dataset),
            device_name=config.trainer.device,
            session=self.session,
        )
        trainer.init_workers()
        trainer.fit()

    def _train_v1(self) -> None:
        """As verl's ``TaskRunnerV1``, in this process."""
        import transfer_queue as tq

        from recipe.partial_rollout.training.v1.trainer import PartialRolloutPPOTrainer

        config = self.config
        config.transfer_queue.enable = True
        if {"name": "TransferQueueController", "namespace": "transfer_queue"} in list_named_actors(all_namespaces=True):
            raise fail("trainer.use_v1", True, "False: another run of this Ray cluster has its TransferQueue")
        tq.init(config.transfer_queue)
        try:
            trainer: Any = PartialRolloutPPOTrainer(config, session=self.session)  # pyright: ignore[reportAbstractUsage]
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
