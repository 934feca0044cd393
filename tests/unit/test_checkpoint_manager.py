"""Between two rounds: a replica that dies anywhere before the weight sync is left out, and restarted for it."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError
from verl.checkpoint_engine import CheckpointEngineManager

from recipe.partial_rollout.config.sections import Deadlines
from recipe.partial_rollout.manager.messages import VersionStart
from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.replicas import ServerControl
from recipe.partial_rollout.training.weight_transfer import RecipeCheckpointManager, WeightSyncError

SERVER_DIED = RayActorError()
ENGINE_DIED = RuntimeError("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue")


class Server:
    """Handle of a server that has no error of a sync to report, unless it is ``dead_with`` one."""

    def __init__(self, replica):
        self.replica, self.weight_sync_error = replica, self

    async def remote(self):
        self.replica.answer("weight_sync_error")


VERBS = {
    "abort_all_requests": "abort",
    "sleep": "sleep",
    "wake_up": "wake_up",
    "check_alive": "check_alive",
    "hold_generation": "hold",
    "resume_generation": "resume",
}


class FakeReplica:
    """Notes what it is asked; a dead one fails at everything, as Ray or vLLM do."""

    def __init__(self, name):
        self.server_address, self.server_handle = name, Server(self)
        self.asked = []
        self.dead_with, self.dies_in, self.dies_with = None, None, None

    def __getattr__(self, verb):
        async def answered(**_):
            self.answer(VERBS[verb])

        return answered

    def answer(self, verb):
        self.asked.append(verb)
        if verb == self.dies_in:
            self.dead_with, self.dies_in = self.dies_with, None
        if self.dead_with is not None:
            raise self.dead_with

    async def relaunch(self):
        self.asked.append("relaunch")
        self.server_address, self.dead_with = f"{self.server_address}'", None


class Trainer:
    """Sends its weights to every replica; a dead one does not take them."""

    def __init__(self, replicas, dies=None):
        self.replicas, self.dies = replicas, dies
        self.got = {}

    def update_weights(self, global_steps, mode):
        async def send():
            if self.dies is not None:
                self.dies.dead_with = SERVER_DIED
            while any(replica.dead_with is not None for replica in self.replicas):
                await asyncio.sleep(0.01)
            self.got = {replica.server_address: global_steps for replica in self.replicas}

        return [send()]


class Versions:
    """The manager's and the trace's part in a sync."""

    def __init__(self):
        self.begun = []
        self.source = SimpleNamespace(left=9, take=lambda count: None)

    def __getattr__(self, verb):
        async def answer(*args):
            if verb == "begin_version":
                self.begun.append(args[0])
                return VersionStart(1, 0)
            return 1

        return SimpleNamespace(remote=answer)

    def phase(self, name, version, start, end):
        pass


async def nothing(*_):
    pass


def driver_of(control, versions, *, separate):
    settings = SimpleNamespace(separate=separate, deadlines=Deadlines(), batch_groups=1)
    context = SimpleNamespace(settings=settings, control=control, trace=versions, source=versions.source, last_step=99)
    pool = SimpleNamespace(ended=lambda: asyncio.sleep(1e6), open_round=nothing)
    roster = SimpleNamespace(announce_restarted=nothing)
    guard = Guard(context, versions, pool)
    driver = Driver(context, versions, None, pool, roster, None, None, None, None, guard)
    driver.begin()
    return driver


def separate(**options):
    """A manager of separate placement; its control, replicas, and versions."""
    manager, control, replicas = build(**options)
    versions = Versions()
    manager._driver = driver_of(control, versions, separate=True)
    return manager, control, replicas, versions


def build(*, pr=True, sync_kills=False):
    replicas = [FakeReplica("a"), FakeReplica("b")]
    control = ServerControl(replicas, 5.0, restarts=1)
    driver = driver_of(control, Versions(), separate=False) if pr else None
    verls = CheckpointEngineManager.__new__(CheckpointEngineManager)
    verls.backend, verls.replicas = "naive", replicas
    verls.actor_wg = Trainer(replicas, dies=replicas[1] if sync_kills else None)
    return RecipeCheckpointManager(verls, 5.0, driver), control, replicas


def between_two_rounds(manager, control):
    """What verl's ``fit`` and the recipe do from the end of a round to the beginning of the next."""
    asyncio.run(control.interrupt())
    manager.sleep_replicas()
    manager.update_weights(3)


@pytest.mark.parametrize("dies_with", [SERVER_DIED, ENGINE_DIED], ids=["server", "engine"])
@pytest.mark.parametrize("dies_in", ["abort", "sleep", "check_alive"])
def test_replica_that_dies_before_the_weight_sync_is_restarted_for_it(dies_in, dies_with):
    manager, control, (alive, dead) = build()
    dead.dies_in, dead.dies_with = dies_in, dies_with
    between_two_rounds(manager, control)
    assert dead.asked[dead.asked.index(dies_in) + 1 :] == ["relaunch", "resume"], "a dead replica is asked nothing"
    assert alive.asked == ["abort", "sleep", "check_alive", "resume"]
    assert manager._verls.actor_wg.got == {"a": 3, "b'": 3} and control.restarted == 1
    assert set(control.servers) == {"a", "b'"}


@pytest.mark.parametrize("kind", ["colocated", "separate"])
def test_replica_that_dies_in_the_weight_sync_ends_the_run_by_name(kind):
    manager, *_, versions = separate(sync_kills=True) if kind == "separate" else (*build(sync_kills=True), None)
    with pytest.raises(WeightSyncError, match=r"weight sync of version 3 failed in vLLM replica b: the server died"):
        manager.update_weights(3)
    assert versions is None or versions.begun == [], "no version begins that an engine lacks"


def test_dead_replica_is_not_woken_up_and_in_the_baseline_ends_the_run_as_in_verl():
    manager, _, (alive, dead) = build()
    dead.dies_in, dead.dies_with = "sleep", SERVER_DIED
    manager.sleep_replicas()
    manager.wake_up_replicas()
    assert (alive.asked, dead.asked) == (["sleep", "wake_up"], ["sleep"])
    baseline, _, (_, dead) = build(pr=False)
    dead.dies_in, dead.dies_with = "sleep", SERVER_DIED
    with pytest.raises(RayActorError):
        baseline.sleep_replicas()


@pytest.mark.parametrize("dies_with", [SERVER_DIED, ENGINE_DIED], ids=["server", "engine"])
@pytest.mark.parametrize("dies_in", ["check_alive", "hold"])
def test_engine_that_dies_while_it_decodes_or_is_held_is_restarted_and_gets_the_weights(dies_in, dies_with):
    manager, control, (alive, dead), versions = separate()
    dead.dies_in, dead.dies_with = dies_in, dies_with
    manager.update_weights(3)
    assert manager._verls.actor_wg.got == {"a": 3, "b'": 3} and control.restarted == 1
    assert versions.begun == [3] and alive.asked[-1] == "resume"
