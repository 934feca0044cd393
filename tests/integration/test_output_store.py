"""The manager behind Ray, and outputs in Ray's store: they outlive the worker that made them, and nothing stays behind."""

import gc
import sys
import time
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


def assert_is_output(output, length, seed):
    expected = output_of(length, seed)
    for name in ("prompt_ids", "response_ids", "response_mask", "log_probs", "versions"):
        assert np.array_equal(getattr(output, name), getattr(expected, name)), name
    assert output.reward_extra_info == {"acc": 1.0} and output.metrics == {}


@ray.remote(num_cpus=0)
class Worker:
    """Finishes what it claims, in one report."""

    def __init__(self, manager):
        self._manager = manager

    def finish(self, length):
        grants = ray.get(self._manager.claim.remote("w0"))
        finished = [Finished(grant.sample_id, output_of(length, seed)) for seed, grant in enumerate(grants)]
        ray.get(self._manager.report.remote(Report("w0", finished)))
        return len(grants)


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


def test_death_elsewhere_reaches_everyone_who_waits_for_the_manager(start):
    actor = start(offer=False)
    ray.get(actor.begin_version.remote(0, [], True))
    waiting = actor.claim.remote("w0"), actor.wait_batch.remote(True)
    ray.get(actor.report.remote(Report("w0", fatal="vLLM replica r0 died")))
    for reference in waiting:
        with pytest.raises(RolloutFailedError, match="vLLM replica r0 died"):
            ray.get(reference, timeout=5)


def take(actor):
    """The batch as the manager answers."""
    return ray.get(actor.wait_batch.remote(True), timeout=10).groups


def fetch(taken):
    return STORE.fetch({group.uid: group.outputs for group in taken})


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
    fetched = fetch(taken)
    assert sorted(fetched) == ["0/0", "0/1", "0/2"]
    for seed, output in enumerate(output for outputs in fetched.values() for output in outputs):
        assert_is_output(output, length, seed)
    ray.get(actor.finish_step.remote())
    del taken, fetched, output
    assert_soon(lambda: ray.get(actor.__ray_call__.remote(objects_known)) == before)


def test_batch_travels_as_one_reference_a_group(start):
    actor = start(groups=6)
    assert finish_all(actor, LARGE) == 12
    taken = take(actor)
    assert len({group.outputs.hex() for group in taken}) == 6
    assert len(ray.cloudpickle.dumps(taken)) < 12_000, "no array travels"


def test_checkpoint_brings_outputs_back_to_the_store_and_those_lost_with_the_manager_are_named(start, tmp_path):
    path = str(tmp_path / "manager.snapshot")
    actor = start()
    finish_all(actor, LARGE)
    ray.get(actor.save.remote(path))
    assert Path(path).stat().st_size > 2 * LARGE * 8
    restored = start(offer=False)
    ray.get(restored.load.remote(path))
    ray.get(restored.begin_version.remote(0, [], False))
    taken = take(restored)
    (outputs,) = fetch(taken).values()
    for seed, output in enumerate(outputs):
        assert_is_output(output, LARGE, seed)
    del outputs, output
    ray.kill(restored)

    def lost():
        # Ray frees the objects of a process shortly after its death.
        try:
            fetch(taken)
        except RolloutFailedError as error:
            return str(error)
        return ""

    assert_soon(lost)
    assert "are lost; resume from the last checkpoint" in lost()


def test_outputs_that_do_not_arrive_end_the_wait():
    @ray.remote(num_cpus=0)
    def never():
        time.sleep(60)

    reference = never.remote()
    with pytest.raises(TimeoutError, match=r"the outputs of 2 groups took more than 0.3 s .*interrupt_s"):
        RayObjects(deadline_s=0.3).fetch({"0/6": ray.put([]), "0/7": reference})
    ray.cancel(reference, force=True)
