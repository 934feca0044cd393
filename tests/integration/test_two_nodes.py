"""A second Ray node joins, and dies: what the driver makes is not on it, and its samples go on on the other node."""

import asyncio
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Deadlines, Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.policies import FailurePolicy
from recipe.partial_rollout.manager.types import Prompt, SampleOutput, Segment
from recipe.partial_rollout.rollout.cluster_nodes import ClusterNodes
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.rollout.workers import WorkerPool
from recipe.partial_rollout.training.agent_loop_manager import on_this_node
from recipe.partial_rollout.worker import live_sample
from recipe.partial_rollout.worker.claim_loop import ClaimLoop

# Ray's workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOLD, MORE = 3, 2
"""tokens of a sample's first engine call, which the manager knows of, and of its second"""


class Worker:
    """An agent-loop worker whose samples make two engine calls; the second ends when ``finish`` is called."""

    def __init__(self):
        self._finishes, self._told = asyncio.Event(), 0

    async def connect(self, name, manager):
        self._claims = ClaimLoop(name, manager, 2, self._run, grant_s=60.0, sample_s=None)

    async def serve(self):
        await self._claims.serve()

    async def open_round(self):
        self._claims.open_round()

    async def told(self):
        return self._told

    async def finish(self):
        self._finishes.set()

    async def node(self):
        return node_here()

    async def _run(self, grant):
        sample = live_sample.LIVE_SAMPLE.get()
        if not grant.segments:
            async with sample.keeper.engine_call(sample):
                sample.add(Segment(np.ones(TOLD, np.int32), np.zeros(TOLD, np.float32), 0))
            await sample.keeper.tell(sample)
            self._told += 1
        async with sample.keeper.engine_call(sample):
            await self._finishes.wait()
        return output_of(TOLD + MORE, kept=sum(map(len, grant.segments)), node=node_here())


def output_of(length, **info):
    return SampleOutput(
        prompt_ids=np.ones(2, np.int32),
        response_ids=np.ones(length, np.int32),
        response_mask=np.ones(length, np.int8),
        log_probs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        segments=1,
        reward_score=1.0,
        reward_extra_info=info,
        num_turns=2,
        metrics={},
    )


def node_here():
    return ray.get_runtime_context().get_node_id()


def only(node_id):
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


@pytest.fixture
def second(start_node, tmp_path):
    """A node that has joined the layer's cluster."""
    name = tmp_path.name
    node = start_node(name, ray.get_runtime_context().gcs_address)
    (entry,) = [entry for entry in ray.nodes() if entry["NodeName"] == name]
    return SimpleNamespace(name=name, id=entry["NodeID"], kill=node.kill, freeze=node.freeze)


@pytest.fixture
def actors():
    """Actors to be ended with the test."""
    made = []
    yield made
    for actor in made:
        ray.kill(actor)


def test_what_the_driver_makes_is_on_its_node_though_all_cpus_are_taken_and_another_node_is_dead_unknown_to_ray(
    second, actors
):
    """A frozen node answers nothing, and Ray's health checks take most of a minute to notice."""
    actors.append(ray.remote(Worker).options(num_cpus=8, scheduling_strategy=only(node_here())).remote())
    assert ray.get(actors[0].node.remote(), timeout=30) == node_here()
    second.freeze()
    made = [on_this_node(ray.remote(Worker)).remote() for _ in range(6)]
    actors += made
    assert ray.get([actor.node.remote() for actor in made], timeout=30) == [node_here()] * 6
    assert [entry["Alive"] for entry in ray.nodes() if entry["NodeID"] == second.id] == [True]


def test_samples_of_a_dead_node_go_on_on_the_drivers_node_from_what_the_manager_knew(second, actors):
    admission = Admission(Mode.WINDOW, 2, 2, 0.0, 4, 4, 4)
    manager = on_this_node(ray.remote(ManagerActor)).remote(admission, Scheduling(), 60.0, FailurePolicy())
    workers = [ray.remote(Worker).options(scheduling_strategy=only(node)).remote() for node in (node_here(), second.id)]
    actors += [manager, workers[0]]
    assert ray.get([worker.node.remote() for worker in workers], timeout=30) == [node_here(), second.id]
    nodes = ClusterNodes()

    def spawn(i):
        worker = on_this_node(ray.remote(Worker)).remote()
        worker.finish.remote()
        actors.append(worker)
        return worker

    async def connect(i, name, worker):
        await worker.connect.remote(name, manager)

    async def round_with_a_death():
        deadlines = Deadlines(start_s=30.0)
        pool = WorkerPool(workers, spawn, connect, 1, deadlines, StopSignals())
        guard = Guard(SimpleNamespace(settings=SimpleNamespace(deadlines=deadlines)), manager, pool)
        await pool.start()
        await manager.begin_version.remote(0, [Prompt(f"0/{i}", 0, {"index": i}) for i in range(2)], True)
        await pool.open_round()
        deadline = time.monotonic() + 30
        while await asyncio.gather(*[worker.told.remote() for worker in workers]) != [2, 2]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        second.kill()
        workers[0].finish.remote()
        waiting = guard.wait(manager.wait_batch.remote(True), "the round", key=None)
        batch = await asyncio.wait_for(waiting, 60)
        return pool.restarted, batch.groups

    restarted, groups = asyncio.run(round_with_a_death())
    assert restarted == 1
    outputs = [output for group in groups for output in group.outputs]
    assert [output.response_length for output in outputs] == [TOLD + MORE] * 4
    assert sorted(output.reward_extra_info["kept"] for output in outputs) == [0, 0, TOLD, TOLD]
    assert {output.reward_extra_info["node"] for output in outputs} == {node_here()}
    (lost,) = nodes.lost()
    assert lost.startswith(f"{second.name} ("), lost
