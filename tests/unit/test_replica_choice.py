"""Samples spread over the replicas by number, and stay where their blocks are while that is fair."""

import pickle
import random

import pytest

from recipe.partial_rollout.worker.live_sample import Place
from recipe.partial_rollout.worker.llm_client import ReplicaChoice


def sample(replica=None, *, resumes=False):
    return Place(replica, resumes)


def choice(**running):
    replicas = ReplicaChoice({address: address.upper() for address in running})
    for address, count in running.items():
        for _ in range(count):
            replicas.take(sample(address))
    return replicas


@pytest.mark.parametrize(
    ("running", "asking", "address"),
    [
        ({"a": 3, "b": 1, "c": 2}, sample(), "b"),
        ({"a": 9, "b": 0}, sample("a"), "a"),
        ({"a": 5, "b": 4}, sample("a", resumes=True), "a"),
        ({"a": 9, "b": 4}, sample("a", resumes=True), "b"),
        ({"a": 1, "b": 2}, sample("gone", resumes=True), "a"),
    ],
    ids=["new", "next turn", "resumes at its blocks", "its replica is far behind", "its replica is no more"],
)
def test_sample_goes_to_the_emptiest_replica_unless_another_has_its_blocks(running, asking, address):
    assert choice(**running).take(asking) == (address, address.upper())


def test_workers_with_few_samples_each_reach_all_replicas_together():
    servers, seen = {f"r{i}": i for i in range(8)}, []
    for worker in range(4):
        replicas = pickle.loads(pickle.dumps(ReplicaChoice(servers, worker / 4)))
        seen += [replicas.take(sample())[1] for _ in range(2)]
    assert sorted(seen) == list(range(8))


def test_choice_by_number_is_that_of_a_full_search():
    rng = random.Random(0)
    replicas = ReplicaChoice({f"r{i}": i for i in range(5)})
    running = []
    for _ in range(500):
        if running and rng.random() < 0.45:
            replicas.release(running.pop(rng.randrange(len(running))))
        else:
            fewest = min(replicas._running.values())
            address, _ = replicas.take(sample())
            assert replicas._running[address] == fewest + 1
            running.append(address)
        if len(running) == 30 and len(replicas._running) == 5:
            assert replicas.leave("r2")
    assert "r2" not in replicas._running


def test_calls_that_go_on_while_a_restarted_replica_is_announced_keep_their_place():
    """Separate placement: b has died, and c is announced while the calls at a are held."""
    replicas = choice(a=8, b=0)
    replicas.leave("b")
    replicas.use({"a": "A", "c": "C"})
    assert [replicas.take(sample())[0] for _ in range(8)] == ["c"] * 8, "c is the emptiest by far"
    for address in [*"aaaaaaaa", "b"]:
        replicas.release(address)
    assert replicas._running == {"a": 0, "c": 8} and replicas.take(sample("b"))[0] == "a"
