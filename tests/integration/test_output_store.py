"""The manager behind Ray, and outputs in Ray's store: they outlive the worker that made them, and nothing stays behind."""

import gc
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import ray

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.actor import ManagerActor, RayObjects
from recipe.partial_rollout.manager.types import Finished, Prompt, Report, RolloutFailedError, SampleOutput

# Ray's workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

STORE = RayObjects(deadline_s=30.0)
LARGE = 30_000
"""tokens: 390 KB, which Ray keeps in its shared store; 5 tokens stay inside the manager's process"""


def output_of(length, seed=0):
    tokens = np.arange(seed, seed + length, dtype=np.int32)
    ones = np.ones(length, np.int8)
    return SampleOutput(tokens[:2], tokens, ones, -tokens.astype(np.float32), tokens % 3, 1, 1.0, {"acc": 1.0}, 2, {})


@ray.remote(num_cpus=0)
class Worker:
    """Finishes what it claims, in one report."""

    def __init__(self, manager):
        self._manager = manager

    def finish(self, length):
        leases = ray.get(self._manager.claim.remote("w0"))
        finished = [Finished(lease.sample_id, output_of(length, seed)) for seed, lease in enumerate(leases)]
        ray.get(self._manager.report.remote(Report("w0", finished)))
        return len(leases)


@pytest.fixture
def start():
    actors = []

    def build(*, groups=1, offer=True):
        settings = PartialRolloutConfig(batch_groups=groups, samples_per_group=2, overlap=0.0)
        actor = ray.remote(ManagerActor).remote(settings, STORE)
        actors.append(actor)
        ray.get(actor.register_worker.remote("w0", 64))
        if offer:
            ray.get(actor.begin_version.remote(0, [Prompt(f"0/{i}", {}) for i in range(groups)], False))
        return actor

    yield build
    for actor in actors:
        ray.kill(actor)


def finish_all(actor, length):
    worker = Worker.remote(actor)
    count = ray.get(worker.finish.remote(length))
    ray.kill(worker)
    return count


def take(actor):
    """The batch as the manager answers."""
    assert ray.get(actor.wait_batch.remote(True), timeout=10)
    return ray.get(actor.batch.remote(), timeout=10).groups


def values_of(output):
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in asdict(output).items()}


def fetched(taken):
    """The values of each output, by group; no reference is kept."""
    found = STORE.fetch({group.uid: group.outputs for group in taken})
    return {uid: [values_of(output) for output in outputs] for uid, outputs in found.items()}


def objects_known(_):
    """Objects of which the manager's process knows, the one that holds its answer left out."""
    gc.collect()
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def assert_soon(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("length", [5, LARGE])
def test_outputs_outlive_their_worker_and_are_freed_once_trained(start, length):
    actor = start(groups=3)
    before = ray.get(actor.__ray_call__.remote(objects_known))
    assert finish_all(actor, length) == 6
    with pytest.raises(RuntimeError, match="finish: sample 0/0#0 is unknown or finished"):
        ray.get(actor.report.remote(Report("w0", [Finished("0/0#0", output_of(LARGE))])))
    ray.get(actor.release_worker.remote("w0"))
    taken = take(actor)
    assert all(isinstance(group.outputs, ray.ObjectRef) for group in taken), "no array travels"
    expected = [values_of(output_of(length, seed)) for seed in range(6)]
    assert fetched(taken) == {f"0/{i}": expected[2 * i : 2 * i + 2] for i in range(3)}
    ray.get(actor.finish_step.remote())
    del taken
    assert_soon(lambda: ray.get(actor.__ray_call__.remote(objects_known)) == before)


def test_checkpoint_brings_outputs_back_and_lost_ones_are_named(start, tmp_path):
    path = str(tmp_path / "manager.snapshot")
    actor = start()
    finish_all(actor, LARGE)
    ray.get(actor.save.remote(path))
    assert Path(path).stat().st_size > 2 * LARGE * 8
    restored = start(offer=False)
    ray.get(restored.load.remote(path))
    ray.get(restored.begin_version.remote(0, [], False))
    taken = take(restored)
    assert fetched(taken) == {"0/0": [values_of(output_of(LARGE, seed)) for seed in (0, 1)]}
    ray.kill(restored)

    def lost():
        # Ray frees the objects of a process shortly after its death.
        try:
            fetched(taken)
        except RolloutFailedError as error:
            return "are lost; resume from the last checkpoint" in str(error)
        return False

    assert_soon(lost)


def test_outputs_that_do_not_arrive_end_the_wait():
    @ray.remote(num_cpus=0)
    def never():
        time.sleep(60)

    reference = never.remote()
    with pytest.raises(TimeoutError, match=r"the outputs of 2 groups took more than 0.3 s .*interrupt_s"):
        RayObjects(deadline_s=0.3).fetch({"0/6": ray.put([]), "0/7": reference})
    ray.cancel(reference, force=True)
