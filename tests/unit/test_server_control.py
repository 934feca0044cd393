"""A replica that dies is left out, and comes back before the next weight sync."""

import asyncio

import pytest
from ray.exceptions import RayActorError

from recipe.partial_rollout.failures import ReplicaError
from recipe.partial_rollout.server_control import ServerControl


class FakeReplica:
    def __init__(self, address):
        self.server_address, self.server_handle = address, f"handle of {address}"
        self.dead_with = None
        self.aborts = self.resumes = 0

    async def abort_all_requests(self, reject_request):
        assert reject_request
        self.aborts += 1
        if self.dead_with:
            raise self.dead_with

    async def resume_generation(self):
        self.resumes += 1

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
