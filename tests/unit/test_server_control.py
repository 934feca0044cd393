"""A replica that dies is left out, comes back before the next weight sync, and becomes known to the workers."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from recipe.partial_rollout import waits
from recipe.partial_rollout.rollout import replicas
from recipe.partial_rollout.rollout.replicas import ReplicaRoster, ServerControl
from recipe.partial_rollout.waits import ReplicaError


class FakeReplica:
    def __init__(self, address):
        self.server_address, self.server_handle = address, f"handle of {address}"
        self.dead_with = None
        self.aborts = self.holds = self.resumes = self.tokens = self.hangs_s = 0

    async def abort_all_requests(self, reject_request):
        assert reject_request
        self.aborts += 1
        if self.dead_with:
            raise self.dead_with

    async def hold_generation(self):
        await self.check_alive()
        await asyncio.sleep(self.hangs_s)
        self.holds += 1

    async def resume_generation(self):
        self.resumes += 1

    async def check_alive(self):
        if self.dead_with:
            raise self.dead_with

    async def running_tokens(self):
        await self.check_alive()
        await asyncio.sleep(self.hangs_s)
        return self.tokens

    async def relaunch(self):
        self.server_address, self.dead_with = f"{self.server_address}'", None


def play(control, *verbs):
    """What the verbs answer, one after another."""

    async def run():
        return [await getattr(control, verb)() for verb in verbs]

    return asyncio.run(run())


def test_dead_replica_is_left_out_and_restarted_under_a_new_address():
    replicas = [FakeReplica("a"), FakeReplica("b")]
    control = ServerControl(replicas, 5.0, restarts=1)
    replicas[1].dead_with = RayActorError()
    play(control, "interrupt", "resume")
    assert control.servers == {"a": "handle of a"} and control.addresses == ["a", "b"]
    assert (replicas[0].resumes, replicas[1].resumes) == (1, 0)
    first, second, _ = play(control, "restart_dead", "restart_dead", "interrupt")
    assert first and not second
    assert control.addresses == ["a", "b'"] and len(control.servers) == 2
    assert control.restarted == 1 and replicas[1].aborts == 2


ENGINE_DEAD = RuntimeError("EngineDeadError: EngineCore encountered an issue")


@pytest.mark.parametrize(
    ("names", "dead_with", "verbs", "error", "message"),
    [
        ("ab", RayActorError(), ("interrupt", "restart_dead"), ReplicaError, r"vLLM replica a is dead.*restarts=0"),
        ("a", ENGINE_DEAD, ("interrupt",), ReplicaError, r"no vLLM replica is alive \(a\)"),
        ("a", ValueError("no such request"), ("interrupt",), ValueError, "no such request"),
    ],
    ids=["died once too often", "the last one dies", "an error of a living one"],
)
def test_death_that_cannot_be_survived_ends_the_wait_by_name(names, dead_with, verbs, error, message):
    replicas = [FakeReplica(name) for name in names]
    replicas[0].dead_with = dead_with
    with pytest.raises(error, match=message):
        play(ServerControl(replicas, 5.0, restarts=0), *verbs)


class Away(FakeReplica):
    async def check_alive(self):
        raise ActorUnavailableError("connection reset", None)


@pytest.mark.parametrize(
    ("kind", "verb", "what"),
    [(FakeReplica, "hold", "holding the vLLM replicas a"), (Away, "restart_dead", "looking after the vLLM replicas a")],
)
def test_replica_that_does_not_answer_ends_the_wait_by_name(kind, verb, what):
    replica = kind("a")
    replica.hangs_s = 60
    with pytest.raises(TimeoutError, match=rf"{what} took more than 0\.1 s .*deadlines\.interrupt_s"):
        play(ServerControl([replica], 0.1), verb)


def test_replica_that_does_not_answer_hides_no_other_that_decodes_or_stands_still():
    living, dead, hung = replicas = [FakeReplica("a"), FakeReplica("b"), FakeReplica("c")]
    living.tokens, dead.dead_with, hung.hangs_s = 7, ENGINE_DEAD, 60
    assert play(ServerControl(replicas, 0.1), "running_tokens") == [{"a": 7}]
    control = ServerControl([living, dead], 5.0)
    play(control, "hold", "hold")
    assert (living.holds, dead.holds, list(control.servers)) == (2, 0, ["a"])


@pytest.mark.parametrize("verb", ["interrupt", "hold", "resume", "restart_dead"])
def test_replica_that_ray_cannot_reach_for_a_moment_is_asked_again(verb, monkeypatch):
    monkeypatch.setattr(waits, "AGAIN_S", 0.001)
    errors = [ActorUnavailableError("connection reset", None)] * 2
    replica = FakeReplica("a")

    def blinks(method):
        async def ask(*args, **kwargs):
            if errors:
                raise errors.pop()
            return await method(*args, **kwargs)

        return ask

    for name in ("abort_all_requests", "hold_generation", "resume_generation", "check_alive"):
        setattr(replica, name, blinks(getattr(replica, name)))
    control = ServerControl([replica], 5.0, restarts=1)
    play(control, verb)
    assert not errors and control.servers.keys() == {"a"} and control.restarted == 0


class Answers:
    """A server handle whose methods answer as given; without the others."""

    def __init__(self, **answers):
        for name, answer in answers.items():
            setattr(self, name, SimpleNamespace(remote=lambda answer=answer: self.give(answer)))

    async def give(self, answer):
        if isinstance(answer, Exception):
            raise answer
        return answer


def control_of(*handles):
    replicas = [FakeReplica(name) for name, _ in zip("abc", handles, strict=False)]
    for replica, handle in zip(replicas, handles, strict=True):
        replica.server_handle = handle
    return ServerControl(replicas, 5.0)


@pytest.mark.parametrize(
    ("handles", "tokens"),
    [
        ((Answers(kv_tokens=900), Answers(kv_tokens=700)), 700),
        ((Answers(kv_tokens=900), Answers(kv_tokens=None)), None),
        ((Answers(kv_tokens=900), Answers()), None),
        ((Answers(kv_tokens=900), Answers(kv_tokens=RayActorError())), 900),
    ],
)
def test_smallest_kv_cache_counts_where_all_are_known(handles, tokens):
    assert asyncio.run(control_of(*handles).kv_tokens()) == tokens


def test_preemptions_are_counted_since_they_were_last_asked_for():
    a, b = Answers(preemptions=3), Answers(preemptions=2)
    control = control_of(a, b)
    assert asyncio.run(control.new_preemptions()) == 5
    a.preemptions = Answers(x=7).x
    assert asyncio.run(control.new_preemptions()) == 4
    assert asyncio.run(control_of(a, Answers(preemptions=None)).new_preemptions()) is None


def test_workers_meet_a_restarted_replica_although_the_load_balancer_is_dead(monkeypatch):
    async def dead(_servers):
        raise ActorDiedError

    async def ask_each(verb, argument):
        told.append((verb, argument(0)))

    told, traced, warned = [], [], []
    monkeypatch.setattr(replicas.logger, "warning", lambda *words: warned.append(words[0]))
    control = SimpleNamespace(addresses=["a", "b"], servers={"a": 1, "b": 2}, restarted=0)
    verb = SimpleNamespace(remote=dead)
    balancer = SimpleNamespace(remove_servers=verb, add_servers=verb)
    roster = ReplicaRoster(control, balancer, SimpleNamespace(use_replicas=traced.append), 1)
    control.addresses, control.servers, control.restarted = ["a", "c"], {"a": 1, "c": 3}, 1
    asyncio.run(roster.announce_restarted(SimpleNamespace(ask_each=ask_each)))
    assert [verb for verb, _ in told] == ["use_replicas"] and traced == [["a", "c"]]
    assert "load balancer is dead" in warned[0]
