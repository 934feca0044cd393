"""The manager behind Ray: who waits is woken, who fails is named, and nobody waits for ever."""

import pytest
import ray

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.messages import RolloutFailedError
from recipe.partial_rollout.manager.policies import FailurePolicy
from recipe.partial_rollout.manager.types import Prompt


def prompts(count, start=0):
    return [Prompt(f"0/{i}", 0, {"index": i}) for i in range(start, start + count)]


@pytest.fixture
def start():
    actors = []

    def build(*, batch=2, n=2, overlap=1.0, stall_s=30.0, workers=(("w0", 64),), mode=Mode.WINDOW, failures=None):
        admission = Admission(mode, batch, n, overlap, 2 * batch, batch * n, 4)
        actor = ray.remote(ManagerActor).remote(admission, Scheduling(), stall_s, failures or FailurePolicy())
        actors.append(actor)
        for name, capacity in workers:
            ray.get(actor.register_worker.remote(name, capacity))
        return actor

    yield build
    for actor in actors:
        ray.kill(actor)


def test_large_claim_is_answered_in_parts(start):
    most = ManagerActor.CLAIM_SAMPLES
    actor = start(batch=1, n=most + 10, workers=(("w0", 4 * most),))
    ray.get(actor.begin_version.remote(0, prompts(2), True))
    sizes = [len(ray.get(actor.claim.remote("w0"))) for _ in range(3)]
    assert sizes == [most, most, 20]


def test_death_of_something_else_reaches_everyone_who_waits(start):
    actor = start()
    ray.get(actor.begin_version.remote(0, [], 1))
    claim, waiting = actor.claim.remote("w0"), actor.wait_batch.remote(True)
    ray.get(actor.abandon.remote("vLLM replica r0 died"))
    for ref in (claim, waiting):
        with pytest.raises(RolloutFailedError, match="vLLM replica r0 died"):
            ray.get(ref, timeout=5)


def test_death_of_the_manager_reaches_a_waiting_worker(start):
    actor = start()
    claim = actor.claim.remote("w0")
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(claim, timeout=10)
