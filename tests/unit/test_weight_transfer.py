"""A weight transfer in two parts: the trainer packs while the engines decode, the engines load while they are held."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError
from verl.checkpoint_engine import CheckpointEngineManager

from recipe.partial_rollout.training import weight_transfer
from recipe.partial_rollout.training.weight_transfer import (
    CachedTransfer,
    HeldTransfer,
    RecipeCheckpointManager,
    WeightSyncError,
    transfer_of,
)
from verl_ext.shm_weights import ShmCheckpointEngine


class Remote:
    """An actor's method: what the call notes, waits for, and raises."""

    def __init__(self, log, name, error=None, hangs=False):
        self.log, self.name, self.error, self.hangs = log, name, error, hangs

    async def remote(self, **given):
        self.log.append((self.name, *given.values()))
        if self.hangs:
            await asyncio.sleep(60)
        if self.error is not None:
            raise self.error


def answering(answer):
    """An actor's method that answers, or raises, as given."""

    async def remote(*_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(remote=remote)


def replica_named(name, log, *, workers=2, **behaviour):
    here = answering({"node_id": "here"})
    loads = [
        SimpleNamespace(update_weights=Remote(log, name, **behaviour), execute_checkpoint_engine=here)
        for _ in range(workers)
    ]
    handle = SimpleNamespace(weight_sync_error=answering(None))
    return SimpleNamespace(server_address=name, workers=loads, server_handle=handle)


class Trainers:
    """The trainers' worker group."""

    world_size = 2

    def __init__(self, log, error=None, hangs=False):
        self.log, self.call = log, Remote(log, "trainer", error, hangs)

    def update_weights(self, global_steps, mode):
        return [self.call.remote(version=global_steps, mode=mode)]

    def execute_checkpoint_engine(self, methods):
        if methods[0] == "prepare":
            return [answering({"node_id": "here"}).remote(method) for method in methods]
        return [asyncio.to_thread(self.log.append, (method,)) for method in methods]


def verls_manager(backend, backend_cls, log, replicas, **trainer):
    verls = CheckpointEngineManager.__new__(CheckpointEngineManager)
    verls.backend, verls.backend_cls, verls.replicas = backend, backend_cls, replicas
    verls.actor_wg = Trainers(log, **trainer)
    return verls


@pytest.fixture
def cached():
    """``cached(trainer=..., **replicas)``: a transfer through a cache to two replicas, and what its actors noted."""

    def build(trainer=None, deadline_s=5.0, **b):
        log = []
        replicas = [replica_named("a", log), replica_named("b", log, **b)]
        verls = verls_manager("shm", ShmCheckpointEngine, log, replicas, **(trainer or {}))
        return transfer_of(verls, deadline_s), log, replicas

    return build


def test_trainer_packs_while_engines_decode_and_they_are_held_only_while_they_load(cached):
    transfer, log, _ = cached()
    noted = []

    class Driver:
        def note_phase(self, name, version, start, end):
            assert start <= end
            log.append(name)

        async def before_load(self, version):
            log.append("held")

        async def after_load(self, version):
            log.append("resumed")

    sync = RecipeCheckpointManager(transfer._verls, 5.0, Driver(), lambda *phase: noted.append(phase))
    for version in (1, 2):
        sync.update_weights(version)
    loads = [("a", 1), ("a", 1), ("b", 1), ("b", 1)]
    assert log[:8] == [("trainer", 1, "shm"), "stage", "held", *loads, "resumed"]
    freed = [("finalize",), ("finalize",)]
    assert log[8:12] == [*freed, ("trainer", 2, "shm"), "stage"], "what was loaded is removed before the next is packed"
    assert [version for version, *_ in noted] == [1, 2]


def test_engine_on_another_node_is_refused_before_anything_is_sent(cached):
    transfer, log, (_, b) = cached()
    b.workers[1].execute_checkpoint_engine = answering({"node_id": "there"})
    with pytest.raises(WeightSyncError, match=r"backend=shm: trainers and engines are on 2 nodes, and must be on one"):
        asyncio.run(transfer.stage(0))
    assert log == []


FULL = RayTaskError("f", "Traceback\nOSError: No space left on device", OSError("No space left on device"))


@pytest.mark.parametrize(
    ("verb", "behaviour", "message"),
    [
        ("stage", {"trainer": {"error": FULL}}, r"staging of version 4 failed in the trainer: .*No space left"),
        ("load", {"error": RayActorError()}, r"loading of version 4 failed in vLLM replica b: RayActorError"),
        ("stage", {"trainer": {"hangs": True}}, r"staging of version 4 by the trainer took more than .*weight_sync_s"),
        ("load", {"hangs": True}, r"loading of version 4 to vLLM replicas a, b took more than 0.05 s"),
    ],
)
def test_failures_and_deadlines_name_the_trainer_or_the_replica(cached, verb, behaviour, message):
    transfer, _, _ = cached(deadline_s=0.05, **behaviour)
    with pytest.raises(WeightSyncError, match=message):
        asyncio.run(getattr(transfer, verb)(4))


@pytest.mark.parametrize(
    ("said", "reason"), [("ValueError: odd shape", "ValueError: odd shape"), (RayActorError(), "the server died")]
)
def test_engine_that_fails_while_its_sender_waits_ends_the_load_by_name(cached, said, reason, monkeypatch):
    monkeypatch.setattr("recipe.partial_rollout.training.weight_transfer._LOOK_EVERY_S", 0.02)
    transfer, _, (_, b) = cached(hangs=True)
    b.server_handle.weight_sync_error = answering(said)
    with pytest.raises(WeightSyncError, match=rf"loading of version 4 failed in vLLM replica b: {reason}"):
        asyncio.run(transfer.load(4))
    # A dead one does not stop the staging: it is restarted before the load.
    asyncio.run(transfer.stage(5))


def test_other_backends_send_in_the_second_part_as_verl_does_but_neither_abort_nor_release(monkeypatch):
    """``nccl`` in verl's own ``update_weights``, with verl's workers and groups replaced."""
    log = []
    monkeypatch.setattr("verl.checkpoint_engine.base.ray.get", lambda results: results)

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

    monkeypatch.setattr("verl.checkpoint_engine.base.RayWorkerGroup", Group)
    made = SimpleNamespace(backend="nccl", custom_backend_module=None)
    monkeypatch.setattr(
        weight_transfer.HeldCheckpointManager, "build_process_group", lambda self, rollout: log.append("group")
    )
    monkeypatch.setattr("verl.checkpoint_engine.base.CheckpointEngineRegistry.get", lambda backend: object)
    verls = verls_manager("nccl", object, log, [SimpleNamespace(workers=["w"], server_address="a", server_handle=None)])
    verls.config, verls.actor_wg = made, Group("trainer")
    transfer = transfer_of(verls, 5.0)

    async def sync():
        assert not await transfer.stage(3)
        log.append("held")
        await transfer.load(3)

    asyncio.run(sync())
    assert isinstance(transfer, HeldTransfer) and not isinstance(transfer, CachedTransfer)
    assert log == ["held", "group", ("trainer", 3), ("engines", 3), ("trainer", "finalize"), ("engines", "finalize")]
