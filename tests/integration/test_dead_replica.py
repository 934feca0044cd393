"""A replica that dies in the middle of a call is named, in both arms, by the worker's error as the driver sees it."""

import asyncio
import sys
import time
from types import SimpleNamespace

import pytest
import ray

from recipe.partial_rollout.waits import one_line
from recipe.partial_rollout.worker.llm_client import ObservedLLMClient, PartialRolloutLLMClient

# Ray's workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROLLOUT = SimpleNamespace(response_length=10, prompt_length=4, scheduling_policy="fcfs", name="vllm")
CONFIG = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=ROLLOUT))


class Server:
    """A replica that decodes for a minute, unless its engine dies."""

    def __init__(self):
        self._calls, self._engine_dies = 0, asyncio.Event()

    async def generate(self, **request):
        self._calls += 1
        await asyncio.wait_for(self._engine_dies.wait(), 60)
        from vllm.v1.engine.exceptions import EngineDeadError

        raise EngineDeadError

    async def calls(self):
        return self._calls

    async def kill_engine(self):
        self._engine_dies.set()


class Balancer:
    """verl's load balancer, of one replica and in the worker's process."""

    def __init__(self, name, server):
        async def no_fields():
            return []

        async def acquire(request_id):
            return name, server

        self.require_acquire_fields = self.require_release_fields = SimpleNamespace(remote=no_fields)
        self.acquire_server = SimpleNamespace(remote=acquire)
        self.release_server = SimpleNamespace(remote=lambda server_id: None)


class Worker:
    """An agent-loop worker, as far as its engine calls go."""

    async def generate(self, client_class, name, server):
        client = client_class(CONFIG, Balancer(name, server))
        return await client.generate("r", prompt_ids=[1, 2], sampling_params={})


@pytest.fixture
def actors():
    """Two replicas and a worker."""
    made = [ray.remote(kind).options(num_cpus=0).remote() for kind in (Server, Server, Worker)]
    yield made
    for actor in made:
        ray.kill(actor)


def test_replica_that_dies_in_a_call_is_named_to_the_driver_in_both_arms(actors):
    """The process of one replica is killed, the engine of the other dies in it."""
    killed, broken, worker = actors
    arms = (ObservedLLMClient, PartialRolloutLLMClient)
    calls = {
        name: [worker.generate.remote(arm, name, server) for arm in arms]
        for name, server in (("killed", killed), ("broken", broken))
    }
    deadline = time.monotonic() + 60
    while ray.get([server.calls.remote() for server in (killed, broken)], timeout=60) != [2, 2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ray.kill(killed)
    ray.get(broken.kill_engine.remote(), timeout=10)
    for name, both in calls.items():
        for call in both:
            with pytest.raises(ray.exceptions.RayError) as failed:
                ray.get(call, timeout=30)
            assert f"vLLM replica {name} failed on request r: " in one_line(failed.value)
