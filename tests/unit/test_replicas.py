"""A replica that dies is left out, and becomes known once it is back; ``test_weight_transfer`` restarts one.

Samples spread over the replicas by number, and stay where their blocks are while that is fair.
"""

import asyncio
import pickle
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from recipe.partial_rollout import waits
from recipe.partial_rollout.rollout.replicas import ServerControl
from recipe.partial_rollout.waits import InfraError
from recipe.partial_rollout.worker.live_sample import ReplicaAffinity
from recipe.partial_rollout.worker.llm_client import ReplicaChoice
from tests.unit.shared import hangs

ENGINE_DEAD = RuntimeError("EngineDeadError: EngineCore encountered an issue")
OUT_OF_REACH = ActorUnavailableError("connection reset", None)


def replica(name="a", *, handle=None, **verbs):
    """A replica that answers; ``verbs``: errors that it answers with instead, or what it does."""
    made = AsyncMock(server_address=name, server_handle=handle)
    for verb, effect in verbs.items():
        getattr(made, verb).side_effect = effect
    return made


def play(control, *verbs):
    """What the verbs answer, one after another."""

    async def run():
        return [await getattr(control, verb)() for verb in verbs]

    return asyncio.run(run())


ABORT, LATE = "abort_all_requests", r"vLLM replica a took more than 0\.1 s .*deadlines\.interrupt_s"


@pytest.mark.parametrize(
    ("names", "answers", "verbs", "error", "message"),
    [
        ("ab", {ABORT: RayActorError()}, ("interrupt", "restart_dead"), InfraError, "replica a is dead.*restarts=0"),
        ("a", {ABORT: ENGINE_DEAD}, ("interrupt",), InfraError, r"no vLLM replica is alive \(a\)"),
        ("a", {ABORT: ValueError("no such request")}, ("interrupt",), ValueError, "no such request"),
        ("a", {"hold_generation": hangs}, ("hold",), TimeoutError, f"holding {LATE}"),
        ("a", {"check_alive": OUT_OF_REACH}, ("restart_dead",), TimeoutError, f"checking the health of {LATE}"),
    ],
    ids=["died once too often", "the last one dies", "an error of a living one", "late", "out of reach"],
)
def test_replica_without_which_a_run_cannot_go_on_ends_the_wait_by_name(names, answers, verbs, error, message):
    first, *others = names
    with pytest.raises(error, match=message):
        play(ServerControl([replica(first, **answers), *map(replica, others)], 0.1), *verbs)


def test_replica_that_does_not_answer_hides_no_other():
    assert play(control_over("load", [(2, 7)], [ENGINE_DEAD], hangs, deadline_s=0.1), "load") == [{"0": (2, 7)}]
    living, dead = replica("a"), replica("b", hold_generation=ENGINE_DEAD)
    control = ServerControl([living, dead], 5.0)
    play(control, "hold", "hold")
    assert living.hold_generation.await_count == 2 and list(control.servers) == ["a"]


def test_replica_that_ray_cannot_reach_for_a_moment_is_asked_again(monkeypatch):
    monkeypatch.setattr(waits, "AGAIN_S", 0.001)
    away = replica(abort_all_requests=[OUT_OF_REACH, OUT_OF_REACH, None])
    control = ServerControl([away], 5.0, restarts=1)
    play(control, "interrupt", "restart_dead")
    assert away.abort_all_requests.await_count == 3 and control.restarted == 0


def control_over(verb, *answers, deadline_s=5.0):
    """Of replicas whose servers give these answers to ``verb``, one after another."""
    handles = [SimpleNamespace(**{verb: SimpleNamespace(remote=AsyncMock(side_effect=each))}) for each in answers]
    return ServerControl([replica(str(i), handle=handle) for i, handle in enumerate(handles)], deadline_s)


@pytest.mark.parametrize(("other", "smallest"), [([700], 700), ([None], None), ([RayActorError()], 900)])
def test_smallest_kv_cache_counts_where_all_are_known(other, smallest):
    assert play(control_over("kv_tokens", [900], other), "kv_tokens") == [smallest]


def test_preemptions_are_counted_since_they_were_last_asked_for():
    control = control_over("preemptions", [3, 7, 7], [2, 2, None])
    assert play(control, *["new_preemptions"] * 3) == [5, 4, None]


# -- which replica a sample goes to ------------------------------------------------------------------------------------


def sample(replica=None, *, resumes=False):
    return ReplicaAffinity(replica, resumes)


def choice(**running):
    chosen = ReplicaChoice({address: address.upper() for address in running})
    for address, count in running.items():
        for _ in range(count):
            chosen.take(sample(address))
    return chosen


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
def test_sample_goes_to_the_emptiest_replica_unless_one_has_its_blocks(running, asking, address):
    assert choice(**running).take(asking) == (address, address.upper())


def test_workers_with_few_samples_each_reach_all_replicas_together():
    servers, seen = {f"r{i}": i for i in range(8)}, []
    for worker in range(4):
        chosen = pickle.loads(pickle.dumps(ReplicaChoice(servers, worker / 4)))
        seen += [chosen.take(sample())[1] for _ in range(2)]
    assert sorted(seen) == list(range(8))


def test_calls_that_go_on_while_a_replica_is_announced_keep_their_place():
    """Separate placement: b has died, and c is announced while the calls at a are held."""
    chosen = choice(a=8, b=0)
    chosen.leave("b")
    chosen.use({"a": "A", "c": "C"})
    assert [chosen.take(sample())[0] for _ in range(8)] == ["c"] * 8, "c is the emptiest by far"
    for address in [*"aaaaaaaa", "b"]:
        chosen.release(address)
    assert chosen._running == {"a": 0, "c": 8} and chosen.take(sample("b"))[0] == "a"
