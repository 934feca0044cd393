"""A weight transfer in two parts: the trainer packs while the engines decode, the engines load while they are held.

A replica that dies anywhere before it is left out, and restarted for it.
"""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError
from verl.checkpoint_engine import CheckpointEngineManager

from recipe.partial_rollout.config.settings import Deadlines
from recipe.partial_rollout.manager.types import RolloutFailedError
from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.prompt_source import TrainingSteps
from recipe.partial_rollout.rollout.recorder import Recorder
from recipe.partial_rollout.rollout.replicas import ServerControl
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.training import weight_transfer
from recipe.partial_rollout.training.weight_transfer import RecipeCheckpointManager
from recipe.partial_rollout.waits import NoAnswerError
from verl_ext.shm_weights import ShmCheckpointEngine

SERVER_DIED = RayActorError()
ENGINE_DIED = RuntimeError("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue")


def answering(answer, log=None, name=None, hangs=False):
    """An actor's method that answers, or raises, as given; ``log`` gets ``name`` and its arguments."""

    async def remote(*_, **given):
        if log is not None:
            log.append(" ".join(map(str, (name, *given.values()))))
        if hangs:
            await asyncio.sleep(60)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(remote=remote)


class Replica:
    """Notes what it is asked; a dead one fails at everything, as Ray or vLLM do."""

    def __init__(self, name, log, error=None, hangs=False, said=None):
        self.name, self.server_address, self.log, self.asked = name, name, log, []
        self.dead_with, self.dies_in = None, {}
        its_error = SimpleNamespace(remote=self.weight_sync_error) if said is None else answering(said)
        self.server_handle = SimpleNamespace(weight_sync_error=its_error)
        here, load = answering({"node_id": "here"}), answering(error, log, f"{name} loads", hangs)
        self.workers = [SimpleNamespace(update_weights=load, execute_checkpoint_engine=here) for _ in range(2)]

    def __getattr__(self, verb):
        async def answer(**_):
            self.asked.append(verb)
            self.log.append(f"{self.name} {verb}")
            self.dead_with = self.dies_in.pop(verb, self.dead_with)
            if self.dead_with is not None:
                raise self.dead_with

        return answer

    async def relaunch(self):
        self.asked.append("relaunch")
        self.server_address, self.dead_with = f"{self.server_address}'", None


class Trainers:
    """The trainers' worker group. Without a cache a sync ends once every replica, alive, has the weights: ``got``."""

    world_size = 2

    def __init__(self, replicas, log, error=None, hangs=False, kills=None):
        self.replicas, self.log, self.got, self.kills = replicas, log, {}, kills
        self.begins = answering(error, log, "trainer sends", hangs)

    def update_weights(self, global_steps, mode):
        async def send():
            await self.begins.remote(version=global_steps)
            if self.kills is not None:
                self.replicas[self.kills].dead_with = SERVER_DIED
            while any(replica.dead_with is not None for replica in self.replicas):
                await asyncio.sleep(0.01)
            self.got = {replica.server_address: global_steps for replica in self.replicas}

        return [send()]

    def execute_checkpoint_engine(self, methods):
        if methods[0] == "prepare":
            return [answering({"node_id": "here"}).remote() for _ in methods]
        return [answering(None, self.log, f"trainer {method}").remote() for method in methods]


class Versions:
    """The part of the manager and of the run's log in a sync."""

    def __init__(self, log):
        self.log, self.source = log, SimpleNamespace(left=9, take=lambda count: None)

    def __getattr__(self, verb):
        async def answer(*args):
            if verb == "begin_version":
                self.log.append(f"version {args[0]} begins")
                return False
            return 1

        return SimpleNamespace(remote=answer)

    def add(self, phase):
        assert phase.start <= phase.end
        self.log.append(phase.name)

    def use_replicas(self, addresses):
        self.log.append(f"replicas are {', '.join(addresses)}")


def build(placement="separate", backend="shm", *, pr=True, deadline_s=5.0, trainer=None, node="here", **b):
    """The checkpoint manager of a run with replicas a and b, its parts, and the log of what they are asked."""
    log = []
    replicas, versions = [Replica("a", log), Replica("b", log, **b)], Versions(log)
    control = ServerControl(replicas, 5.0, restarts=1)
    settings = SimpleNamespace(
        separate=placement == "separate", deadlines=Deadlines(weight_sync_s=deadline_s), enable=pr
    )
    recorder, ended = Recorder(settings, versions, control, None), []

    def end_step(step):
        ended.append(ended[-1] if step is None else step)
        log.append(f"step {ended[-1]} ends")
        return ended[-1]

    guard = Guard(recorder, versions, [], None, [], StopSignals())
    driver = Driver(recorder, TrainingSteps(99, 1, 99), versions.source, versions, None, guard)
    trainers = Trainers(replicas, log, **(trainer or {}))
    replicas[1].workers[1].execute_checkpoint_engine = answering({"node_id": node})
    verls = verls_manager(backend, ShmCheckpointEngine if backend == "shm" else object, trainers, replicas)
    manager = RecipeCheckpointManager(verls, recorder, end_step, driver if pr else None)
    return SimpleNamespace(manager=manager, control=control, replicas=replicas, trainers=trainers, log=log)


def verls_manager(backend, backend_cls, trainers, replicas):
    verls = CheckpointEngineManager.__new__(CheckpointEngineManager)
    verls.backend, verls.backend_cls, verls.actor_wg, verls.replicas = backend, backend_cls, trainers, replicas
    return verls


def test_trainer_packs_while_engines_decode_and_holds_them_for_the_load():
    run = build()
    for version in (1, 2):
        run.manager.update_weights(version)
    log = [line for line in run.log if "check_alive" not in line and line not in ("sync", "step 1 ends", "step 2 ends")]
    held, loads = ["a hold_generation", "b hold_generation"], ["a loads 1"] * 2 + ["b loads 1"] * 2
    resumed = ["version 1 begins", "a resume_generation", "b resume_generation", "hold"]
    assert log[: 2 + 2 + 4 + 4] == ["trainer sends 1", "stage", *held, *loads, *resumed]
    assert log[12:16] == ["trainer finalize", "trainer finalize", "trainer sends 2", "stage"], "first it frees the old"
    assert run.log.count("sync") == 2


def test_weights_that_are_sent_again_keep_their_version():
    run = build("colocated", "naive", pr=False)
    run.manager.update_weights(3)
    before = len(run.log)
    run.manager.update_weights()
    assert run.log[before:] == run.log[:before]
    assert [line for line in run.log if "sends" in line] == ["trainer sends 3"] * 2


def test_validation_alone_sends_to_separate_engines_without_a_driver():
    run = build(pr=False)
    run.manager.update_weights(3)
    assert [line for line in run.log if "loads" in line] == ["a loads 3"] * 2 + ["b loads 3"] * 2
    assert not any("hold" in line or "begins" in line for line in run.log)


def test_engine_on_another_node_is_refused_before_anything_is_sent():
    with pytest.raises(
        RolloutFailedError, match=r"backend=shm: trainers and engines are on 2 nodes, and must be on one"
    ):
        build(node="there")


ODD = "ValueError: odd shape"
FULL = RayTaskError("f", "Traceback\nOSError: No space left on device", OSError("No space left on device"))


@pytest.mark.parametrize(
    ("part", "scene", "message"),
    [
        ("stage", {"trainer": {"error": FULL}}, r"staging of version 4 failed in the trainer: .*No space left"),
        ("stage", {"trainer": {"hangs": True}}, r"staging of version 4 by the trainer took more than .*weight_sync_s"),
        ("load_staged", {"hangs": True}, r"loading of version 4 to vLLM replicas a, b took more than 0.3 s"),
        ("load_staged", {"error": RayActorError()}, r"loading of version 4 failed in vLLM replica b: RayActorError"),
        # Its sender waits for the engine that has failed.
        ("load_staged", {"hangs": True, "said": ODD}, rf"loading of version 4 failed in vLLM replica b: {ODD}"),
        (
            "load_staged",
            {"hangs": True, "said": SERVER_DIED},
            r"of version 4 failed in vLLM replica b: the server died",
        ),
        # The trainer fails by the engine's error.
        ("send", {"backend": "naive", "trainer": {"error": FULL}, "said": ODD}, rf"failed in vLLM replica b: {ODD}"),
    ],
)
def test_failures_and_deadlines_name_the_trainer_or_the_replica(part, scene, message, monkeypatch):
    monkeypatch.setattr(weight_transfer, "_LOOK_EVERY_S", 0.02)
    run = build(deadline_s=0.3, **scene)
    with pytest.raises((RolloutFailedError, NoAnswerError), match=message):
        asyncio.run(getattr(run.manager, part)(4))
    if part == "load_staged":
        # A dead engine does not stop the staging: it is restarted before the load.
        asyncio.run(run.manager.stage(5))


@pytest.mark.parametrize("dies_with", [SERVER_DIED, ENGINE_DIED], ids=["server", "engine"])
@pytest.mark.parametrize(
    ("placement", "dies_in"),
    [
        ("colocated", "abort_all_requests"),
        ("colocated", "sleep"),
        ("colocated", "check_alive"),
        ("separate", "check_alive"),
        ("separate", "hold_generation"),
    ],
)
def test_replica_that_dies_before_the_weight_sync_is_restarted_for_it(placement, dies_in, dies_with):
    run = build(placement, "naive")
    alive, dead = run.replicas
    dead.dies_in = {dies_in: dies_with}
    if placement == "colocated":
        # As verl's ``fit`` and the recipe end a round.
        asyncio.run(run.control.interrupt())
        run.manager.sleep_replicas()
    run.manager.update_weights(3)
    assert dead.asked[dead.asked.index(dies_in) + 1] == "relaunch", "a dead replica is asked nothing"
    assert alive.asked[-1] == dead.asked[-1] == "resume_generation" and "relaunch" not in alive.asked
    assert run.trainers.got == {"a": 3, "b'": 3}
    assert run.control.restarted == 1 and set(run.control.servers) == {"a", "b'"}
    assert ("version 3 begins" in run.log) == (placement == "separate")
    run.manager.update_weights(4)
    assert run.log.count("replicas are a, b'") == 1, "which workers are told, too"


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_replica_that_dies_in_the_weight_sync_ends_the_run_by_name(placement):
    run = build(placement, "naive", trainer={"kills": 1})
    with pytest.raises(RolloutFailedError, match=r"weight sync of version 3 failed in vLLM replica b: the server died"):
        run.manager.update_weights(3)
    assert "version 3 begins" not in run.log, "an engine lacks it"


def test_other_backends_send_as_verl_does_without_abort_or_release(monkeypatch):
    """``nccl`` in verl's own ``update_weights``, with verl's workers and groups replaced."""
    log = []

    class Group:
        world_size = 2

        def __init__(self, name="engines", **given):
            self.name = name

        def update_weights(self, global_steps, mode=None):
            log.append((self.name, global_steps))
            return [{}]

        def execute_checkpoint_engine(self, method):
            log.append((self.name, method[0]))
            return []

    base = "verl.checkpoint_engine.base"
    monkeypatch.setattr(f"{base}.ray.get", lambda results: results)
    monkeypatch.setattr(f"{base}.RayWorkerGroup", Group)
    monkeypatch.setattr(f"{base}.CheckpointEngineRegistry.get", lambda backend: object)
    manager = weight_transfer.HeldCheckpointManager
    monkeypatch.setattr(manager, "build_process_group", lambda self, rollout: log.append("group"))
    replica = SimpleNamespace(workers=["w"], server_address="a", server_handle=None)
    verls = verls_manager("nccl", object, Group("trainer"), [replica])
    verls.config = SimpleNamespace(backend="nccl", custom_backend_module=None)
    recorder = SimpleNamespace(settings=SimpleNamespace(deadlines=Deadlines(weight_sync_s=5.0)))
    asyncio.run(RecipeCheckpointManager(verls, recorder, None, None).send(3))
    assert log == ["group", ("trainer", 3), ("engines", 3), ("trainer", "finalize"), ("engines", "finalize")]
