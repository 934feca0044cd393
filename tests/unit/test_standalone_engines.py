"""In separate placement verl's trainer starts engines beside its workers, not on their devices; then all is as before."""

import asyncio
from types import SimpleNamespace

import pytest
from verl.trainer.ppo import ray_trainer
from verl.workers.rollout.llm_server import LLMServerManager

from verl_ext.standalone_engines import StandaloneServerManager, standalone_engines


class Group:
    """Stands for a ``RayWorkerGroup``."""

    world_size = 4


class Replica:
    """Says how it is started."""

    _server_handle = _server_address = started = None

    def __init__(self, **sizes):
        pass

    async def init_hybrid(self, worker_group):
        self.started = "hybrid"

    async def init_standalone(self):
        self.started = "standalone"


def test_engines_get_the_rollouts_devices_instead_of_the_trainers(resolved_config):
    ours = ("partial_rollout.placement=separate", "actor_rollout_ref.rollout.nnodes=1")
    config = resolved_config("quickstart_cpu", *ours, "actor_rollout_ref.rollout.n_gpus_per_node=3")

    def start(manager_class):
        """As ``RayPPOTrainer.init_workers`` calls it, with four trainers."""
        manager = manager_class(config=config, worker_group=Group(), rollout_resource_pool=SimpleNamespace())
        manager.rollout_replica_class = Replica
        asyncio.run(manager._initialize_llm_servers())
        return [each.started for each in manager.rollout_replicas]

    assert start(LLMServerManager) == ["hybrid"] * 4
    assert start(StandaloneServerManager) == ["standalone"] * 3


def test_names_are_verls_own_again_afterwards_whatever_happens():
    before = ray_trainer.LLMServerManager
    with pytest.raises(KeyError), standalone_engines():
        assert ray_trainer.LLMServerManager is StandaloneServerManager
        raise KeyError
    assert ray_trainer.LLMServerManager is before
