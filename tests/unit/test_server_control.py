"""A replica that dies is left out, and comes back before the next weight sync."""

import asyncio
import gc
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from recipe.partial_rollout import waits
from recipe.partial_rollout.rollout.replicas import ServerControl
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


def test_dead_replica_is_left_out_and_restarted_under_a_new_address():
    replicas = [FakeReplica("a"), FakeReplica("b")]
    control = ServerControl(replicas, 5.0, restarts=1)
    replicas[1].dead_with = RayActorError()

    async def run():
        await control.interrupt()
        assert control.servers == {"a": "handle of a"} and control.addresses == ["a", "b"]
        await control.resume()
        assert (replicas[0].resumes, replicas[1].resumes) == (1, 0)
        assert await control.restart_dead() and not await control.restart_dead()
        await control.interrupt()

    asyncio.run(run())
    assert control.addresses == ["a", "b'"] and len(control.servers) == 2
    assert control.restarted == 1 and replicas[1].aborts == 2


def test_replica_that_dies_in_a_hold_is_left_out_and_the_others_stand_still():
    replicas = [FakeReplica("a"), FakeReplica("b")]
    control = ServerControl(replicas, 5.0)
    replicas[1].dead_with = RuntimeError("EngineDeadError: EngineCore encountered an issue")

    async def run():
        assert 0 <= await control.hold() < 5
        assert list(control.servers) == ["a"]
        await control.hold()

    asyncio.run(run())
    assert [replica.holds for replica in replicas] == [2, 0]


def test_replica_that_does_not_hold_is_named_at_the_deadline():
    replica = FakeReplica("a")
    replica.hangs_s = 60
    with pytest.raises(TimeoutError, match=r"holding the vLLM replicas a took more than .*deadlines\.interrupt_s"):
        asyncio.run(ServerControl([replica], 0.05).hold())


def test_replica_that_died_once_too_often_is_named():
    replicas = [FakeReplica("a"), FakeReplica("b")]
    control = ServerControl(replicas, 5.0, restarts=0)
    replicas[0].dead_with = RayActorError()

    async def run():
        await control.interrupt()
        await control.restart_dead()

    with pytest.raises(ReplicaError, match=r"vLLM replica a is dead.*failures\.replica_restarts=0"):
        asyncio.run(run())


def test_last_replica_to_die_ends_the_interruption():
    replica = FakeReplica("a")
    replica.dead_with = RuntimeError("EngineDeadError: EngineCore encountered an issue")
    with pytest.raises(ReplicaError, match=r"no vLLM replica is alive \(a\)"):
        asyncio.run(ServerControl([replica], 5.0).interrupt())


def test_error_of_a_living_replica_is_its_own():
    replica = FakeReplica("a")
    replica.dead_with = ValueError("no such request")
    with pytest.raises(ValueError, match="no such request"):
        asyncio.run(ServerControl([replica], 5.0).interrupt())


def test_replica_that_does_not_answer_hides_no_other_that_decodes():
    living, dead, hung = replicas = [FakeReplica("a"), FakeReplica("b"), FakeReplica("c")]
    living.tokens, dead.dead_with, hung.hangs_s = 7, RayActorError(), 60
    assert asyncio.run(ServerControl(replicas, 0.1).running_tokens()) == {"a": 7}


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


def test_replica_that_does_not_say_is_named_at_the_deadline():
    control = control_of(Answers(kv_tokens=1))
    control._deadline_s = 0.01
    control.servers["a"].kv_tokens.remote = lambda: asyncio.sleep(5)
    with pytest.raises(TimeoutError, match=r"asking the vLLM replicas a for their kv_tokens .*deadlines\.interrupt_s"):
        asyncio.run(control.kv_tokens())


def test_question_that_is_abandoned_prints_nothing():
    complaints = []

    async def abandon():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        control = control_of(Answers(kv_tokens=1))
        control.servers["a"].kv_tokens.remote = lambda: asyncio.sleep(5)
        asking = asyncio.create_task(control.kv_tokens())
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
        gc.collect()

    asyncio.run(abandon())
    assert complaints == []


@pytest.mark.parametrize("verb", ["interrupt", "hold", "resume", "restart_dead", "kv_tokens"])
def test_replica_that_ray_cannot_reach_for_a_moment_is_asked_again(verb, monkeypatch):
    monkeypatch.setattr(waits, "AGAIN_S", 0.001)
    errors = [ActorUnavailableError("connection reset", None)] * 2

    class Blinking(FakeReplica):
        def __getattribute__(self, name):
            if name in ("server_address", "server_handle") or name.startswith("_"):
                return super().__getattribute__(name)
            return self._blinks(super().__getattribute__(name))

        def _blinks(self, method):
            async def ask(*args, **kwargs):
                if errors:
                    raise errors.pop()
                return await method(*args, **kwargs)

            return ask if callable(method) else method

    replica = Blinking("a")
    replica.server_handle = SimpleNamespace(kv_tokens=SimpleNamespace(remote=replica._blinks(tokens_of_kv)))
    control = ServerControl([replica], 5.0, restarts=1)
    asyncio.run(getattr(control, verb)())
    assert not errors and control.servers.keys() == {"a"} and control.restarted == 0


async def tokens_of_kv():
    return 900


def test_replica_that_stays_out_of_reach_ends_the_wait_by_name():
    class Away(FakeReplica):
        async def check_alive(self):
            raise ActorUnavailableError("connection reset", None)

    with pytest.raises(TimeoutError, match=r"looking after the vLLM replicas a took more than 0\.1 s .*interrupt_s"):
        asyncio.run(ServerControl([Away("a")], 0.1).restart_dead())
