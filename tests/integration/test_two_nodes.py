"""A second Ray node joins, and freezes: what the driver makes is not on it. tests/e2e/test_two_nodes.py kills one."""

import sys

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.partial_rollout.training.agent_loop_manager import on_this_node

# Ray's workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Worker:
    async def node(self):
        return node_here()


def node_here():
    return ray.get_runtime_context().get_node_id()


@pytest.fixture
def actors():
    """Actors to be ended with the test."""
    made = []
    yield made
    for actor in made:
        ray.kill(actor)


def test_what_the_driver_makes_is_on_its_node_beside_a_dead_one(start_node, actors, tmp_path):
    """A frozen node answers nothing, and Ray's health checks take most of a minute to notice."""
    here = NodeAffinitySchedulingStrategy(node_here(), soft=False)
    actors.append(ray.remote(Worker).options(num_cpus=8, scheduling_strategy=here).remote())
    assert ray.get(actors[0].node.remote(), timeout=30) == node_here()
    start_node(tmp_path.name, ray.get_runtime_context().gcs_address).freeze()
    actors += [on_this_node(ray.remote(Worker)).remote() for _ in range(6)]
    assert ray.get([actor.node.remote() for actor in actors[1:]], timeout=30) == [node_here()] * 6
    assert [entry["Alive"] for entry in ray.nodes() if entry["NodeName"] == tmp_path.name] == [True]
