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


@pytest.fixture
def start():
    actors = []

    def build(*, n=2, capacity=64):
        admission = Admission(Mode.WINDOW, 1, n, 1.0, 2, n, 4)
        actor = ray.remote(ManagerActor).remote(admission, Scheduling(), 30.0, FailurePolicy())
        actors.append(actor)
        ray.get(actor.register_worker.remote("w0", capacity))
        return actor

    yield build
    for actor in actors:
        ray.kill(actor)


def test_large_claim_is_answered_in_parts(start):
    most = ManagerActor.CLAIM_SAMPLES
    actor = start(n=most + 10, capacity=4 * most)
    ray.get(actor.begin_version.remote(0, [Prompt(f"0/{i}", 0, {}) for i in range(2)], True))
    sizes = [len(ray.get(actor.claim.remote("w0"))) for _ in range(3)]
    assert sizes == [most, most, 20]


def test_death_of_something_else_and_of_the_manager_reaches_everyone_who_waits(start):
    actor = start()
    ray.get(actor.begin_version.remote(0, [], 1))
    claim, waiting = actor.claim.remote("w0"), actor.wait_batch.remote(True)
    ray.get(actor.abandon.remote("vLLM replica r0 died"))
    for ref in (claim, waiting):
        with pytest.raises(RolloutFailedError, match="vLLM replica r0 died"):
            ray.get(ref, timeout=5)
    other = start()
    claim = other.claim.remote("w0")
    ray.kill(other)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(claim, timeout=10)
