"""The driver's waits: lost workers are replaced, whoever does not answer is named, and no wait outlasts its deadline."""

import asyncio
import contextlib
import itertools
import signal
import time
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from recipe.partial_rollout import waits
from recipe.partial_rollout.config.settings import Deadlines
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.types import RolloutFailedError
from recipe.partial_rollout.rollout import guard as guard_module
from recipe.partial_rollout.rollout import stop as stop_module
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining
from tests.unit.shared import InProcess, Local, hangs, settings_of

QUICK = Deadlines(stall_s=0.4, interrupt_s=0.2, weight_sync_s=0.2)


@pytest.fixture(autouse=True)
def asked_again_soon(monkeypatch):
    monkeypatch.setattr(waits, "AGAIN_S", 0.01)
    monkeypatch.setattr(guard_module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(guard_module, "_WATCH_EVERY_S", 0.002)
    monkeypatch.setattr(stop_module, "_LOOK_EVERY_S", 0.01)


def out_of_reach():
    return ActorUnavailableError("connection reset", None)


class FakeWorker:
    """Actor handle: ``serve`` ends when it is told to; questions in ``hangs`` get no answer."""

    def __init__(self, connected):
        self.ended, self.served, self.asked, self.errors, self.hangs = Future(), 0, [], [], set()
        self.connected = connected
        self.serve = SimpleNamespace(remote=self._serve)

    def _serve(self):
        self.served += 1
        return SimpleNamespace(future=lambda: self.ended)

    def __getattr__(self, verb):
        return SimpleNamespace(remote=partial(self._answer, verb))

    async def _answer(self, verb, *args):
        if verb == "connect":
            await self.connected(self, *args)
            return None
        if self.ended.done() and self.errors == []:
            raise ActorDiedError
        if self.errors:
            raise self.errors.pop(0)
        if verb in self.hangs:
            await hangs()
        self.asked.append((verb, *args))
        return verb


class Life:
    """A guard over two workers; ``tokens``: what an engine says, one time after another."""

    def __init__(self, restarts=1, trainers=(), manager=None, tokens=(), deadlines=QUICK):
        self.workers = [self._spawn() for _ in range(2)]
        self.connected, self.killed, self.stop = [], [], StopSignals()
        self.connecting_s, self.dies = 0.0, None
        self.manager = manager or AsyncMock(**{"release_worker.return_value": 3})
        tokens = itertools.chain(tokens, itertools.repeat(0))

        async def load():
            return {"a": (1, next(tokens))}

        failures = SimpleNamespace(worker_restarts=restarts)
        self.run = SimpleNamespace(
            settings=SimpleNamespace(deadlines=deadlines, batch_groups=1, failures=failures),
            control=SimpleNamespace(load=load, servers={"a": "server"}),
            slots=SimpleNamespace(of_a_worker=lambda workers: 8 // workers),
        )
        self.guard = Guard(self.run, Local(self.manager), self.workers, self._spawn, trainers, self.stop)

    def _spawn(self):
        return FakeWorker(self._connect)

    async def _connect(self, worker, name, manager, slots, servers, place):
        if name == self.dies:
            raise ActorDiedError
        # Until it has started it answers nothing.
        worker.hangs.add("__ray_ready__")
        await asyncio.sleep(self.connecting_s)
        worker.hangs.clear()
        assert (slots, servers) == (4, {"a": "server"}) and place in (0.0, 0.5)
        self.connected.append(name)

    def kill(self, worker):
        self.killed.append(worker)
        worker.ended.set_exception(ActorDiedError())

    @property
    def released(self):
        """Names of the workers whose samples the manager has taken back."""
        return [name for (name,), _ in self.manager.release_worker.call_args_list]

    def batch(self, awaitable=None):
        return self.guard.wait_batch(awaitable or hangs(), 1, 0.0)


@contextlib.asynccontextmanager
async def life(**options):
    one = Life(**options)
    await one.guard.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(guard_module.ray, "kill", one.kill)
        async with asyncio.timeout(5):
            yield one


# -- workers that are lost -----------------------------------------------------------------------------------------------


async def test_dead_worker_is_replaced_under_a_new_name():
    async with life() as one:
        await one.guard.wait(one.guard.set_gate(open=True), "opening the round", key=None)
        main, dead = asyncio.get_running_loop().create_future(), one.workers[1]
        waiting = asyncio.create_task(one.batch(main))
        await asyncio.sleep(0.01)
        dead.ended.set_exception(RayActorError())
        await asyncio.sleep(0.05)
        assert not waiting.done() and one.workers[1] is not dead
        assert one.connected == ["agent_loop_worker_0", "agent_loop_worker_1", "agent_loop_worker_1.2"]
        assert one.released == ["agent_loop_worker_1"] and one.guard.restarted == 1
        assert one.workers[1].asked[0] == ("open_round",)
        main.set_result("complete")
        one.workers[0].ended.set_exception(RayActorError())
        assert await waiting == "complete"
        assert await one.guard.ask("close_round") == ["close_round"], "the one who lives answers"


@pytest.mark.parametrize(
    ("error", "restarts", "said"),
    [
        (RayActorError(), 0, r"agent_loop_worker_0 died during the round.*worker_restarts=0"),
        (ValueError("a mistake"), 1, "failed during the round: ValueError: a mistake"),
    ],
)
async def test_worker_that_fails_or_dies_once_too_often_ends_the_wait_by_name(error, restarts, said):
    async with life(restarts=restarts) as one:
        one.workers[0].ended.set_exception(error)
        with pytest.raises(RolloutFailedError, match=said):
            await one.guard.wait(hangs(), "the round", key=None)


async def test_worker_that_dies_while_it_starts_is_named():
    one = Life()
    one.dies = "agent_loop_worker_1"
    with pytest.raises(RolloutFailedError, match=r"agent_loop_worker_1 died during its start: ActorDiedError"):
        await one.guard.start()
    async with life() as one:
        one.dies = "agent_loop_worker_0.2"
        one.workers[0].ended.set_exception(RayActorError())
        with pytest.raises(RolloutFailedError, match=r"agent_loop_worker_0\.2 died during its start: ActorDiedError"):
            await one.batch()


async def test_worker_that_ray_cannot_reach_for_a_moment_is_asked_again():
    async with life() as one:
        worker, other = one.workers
        lost, worker.ended, worker.errors = worker.ended, Future(), [out_of_reach()]
        lost.set_exception(out_of_reach())
        await one.guard.wait(asyncio.sleep(0.1), "the round", key=None)
        assert one.workers[0] is worker and worker.served == 2, "its loop is awaited again"
        other.errors = [out_of_reach()]
        assert await one.guard.ask("use_replicas", 7) == ["use_replicas"] * 2 and ("use_replicas", 7) in other.asked
        assert one.released == [] and one.guard.restarted == 0


@pytest.mark.parametrize("stopped", [False, True])
async def test_replacement_that_began_is_whole_when_the_wait_ends(stopped):
    """And a worker that starts for longer than an answer may take is not ended."""
    async with life() as one:
        dead, one.connecting_s = one.workers[1], 2 * QUICK.interrupt_s
        waiting = asyncio.create_task(one.batch(asyncio.sleep(9 if stopped else 0.3, "complete")))
        await asyncio.sleep(0.01)
        dead.ended.set_exception(RayActorError())
        await asyncio.sleep(0.01)
        if stopped:
            one.stop._number = signal.SIGTERM
        with pytest.raises(StopTraining) if stopped else contextlib.nullcontext():
            assert await waiting == "complete"
        new = one.workers[1]
        assert new is not dead and one.connected[-1] == "agent_loop_worker_1.2" and new.served == 1
        assert await one.guard.ask("flush") == ["flush"] * 2 and one.guard.restarted == 1 and one.killed == []


async def test_worker_that_hangs_while_the_batch_is_awaited_is_ended_by_name():
    said = r"agent_loop_worker_0 was ended because it did not answer: ray_ready took more than 0.2 s \(.*interrupt_s\)"
    async with life(restarts=0) as one:
        one.workers[0].hangs.add("__ray_ready__")
        with pytest.raises(RolloutFailedError, match=rf"{said}.*restarts=0"):
            await one.batch()
        assert one.killed == [one.workers[0]]


async def test_stop_signal_shortens_the_wait_for_a_worker_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(stop_module, "_GRACE_S", 0.05)
    async with life(deadlines=Deadlines(interrupt_s=600)) as one:
        hung = one.workers[0]
        hung.hangs.add("close_round")
        asyncio.get_running_loop().call_later(0.05, setattr, one.stop, "_number", signal.SIGTERM)
        await one.guard.wait(one.guard.set_gate(open=False), "closing the round", key=None)
        await one.guard.wait(asyncio.sleep(0.02), "the next wait", key=None)
        assert one.workers[0] is hung and one.released == ["agent_loop_worker_0"], "its samples go into the checkpoint"
        assert await one.guard.ask("flush") == ["flush"]


# -- what else ends a wait -----------------------------------------------------------------------------------------------


async def test_manager_that_does_not_answer_ends_the_round():
    async with life(manager=AsyncMock(**{"progress.side_effect": hangs})) as one:
        with pytest.raises(TimeoutError, match=r"^asking the manager actor how far the round is took more than 0\.2 s"):
            await one.batch()


def trainer(*script):
    """Actor handle that raises the errors of ``script``, and is ready before, between and after them."""
    ready = AsyncMock(side_effect=itertools.chain(script, itertools.repeat(None)))
    return SimpleNamespace(__ray_ready__=SimpleNamespace(remote=ready))


async def test_round_ends_when_a_trainer_dies_and_nothing_of_it_goes_on():
    async with life(trainers=[trainer(out_of_reach()), trainer(None, ActorDiedError())]) as one:
        batch = asyncio.ensure_future(hangs())
        with pytest.raises(RolloutFailedError, match=r"trainer 1 of 2 died during the round: ActorDiedError"):
            await one.batch(batch)
        await asyncio.wait([batch])
        assert batch.cancelled()


# -- engines that decode keep the stall away -----------------------------------------------------------------------------


async def test_round_of_one_long_response_lasts_while_it_is_decoded(prompts):
    actor = ManagerActor(settings_of(overlap=0.0, stall_s=QUICK.stall_s), InProcess())
    await actor.register_worker("w0", 4)
    await actor.begin_version(0, prompts(1), False)
    await actor.claim("w0")
    # Asked every 0.02 s.
    one = Life(manager=actor, tokens=itertools.chain(range(50), itertools.repeat(50)))
    began = time.monotonic()
    with pytest.raises(RolloutFailedError, match=r"no sample reported and no engine made a token for .*; 1 unfinished"):
        await asyncio.wait_for(one.batch(actor.wait_batch(True)), 5)
    assert time.monotonic() - began > 3 * QUICK.stall_s
