"""Real workers that stop answering: the driver's waits end in time, and the worker is replaced."""

import asyncio
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import ray

from recipe.partial_rollout.config.settings import Deadlines
from recipe.partial_rollout.manager.types import Standing
from recipe.partial_rollout.rollout import guard as guard_module
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.stop import StopSignals

# Ray's workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

INTERRUPT_S = 2.0


class Worker:
    async def serve(self):
        await asyncio.sleep(1e6)

    async def connect(self, name, manager, slots, servers, place):
        return None

    async def pid(self):
        return os.getpid()

    async def close_round(self):
        return os.getpid()

    async def hang(self, seconds):
        """As a backtracking regular expression does: the event loop stands still."""
        time.sleep(seconds)


class Manager:
    async def standing(self, decoded):
        return Standing(0, 0, 0)

    async def release_worker(self, name):
        return 3


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setattr(guard_module, "LOOK_EVERY_S", 0.2)
    workers = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
    manager = ray.remote(Manager).options(num_cpus=0).remote()
    deadlines, stop = Deadlines(interrupt_s=INTERRUPT_S), StopSignals()

    def spawn():
        return ray.remote(Worker).options(num_cpus=0).remote()

    async def no_load():
        return {}

    settings = SimpleNamespace(deadlines=deadlines, batch_groups=1, failures=SimpleNamespace(worker_restarts=2))
    control = SimpleNamespace(load=no_load, servers={})
    slots = SimpleNamespace(of_a_worker=lambda workers: 1)
    guard = Guard(settings, manager, workers, spawn, control, slots, [], stop)
    asyncio.run(guard.start())
    yield workers, guard
    for actor in [*workers, manager]:
        ray.kill(actor)


def test_worker_that_hangs_in_a_question_or_while_the_batch_is_awaited_is_replaced_in_time(guarded):
    workers, guard = guarded
    pids = ray.get([worker.pid.remote() for worker in workers], timeout=30)
    workers[1].hang.remote(60)
    time.sleep(0.2)

    def ask():
        return asyncio.run(guard.wait(guard.ask("close_round"), "asking the workers", key=None))

    began = time.monotonic()
    answers = ask()
    assert answers == [pids[0]] and INTERRUPT_S <= time.monotonic() - began < INTERRUPT_S + 2
    asyncio.run(guard.wait(asyncio.sleep(0.1), "the next wait"))
    assert guard.restarted == 1
    again = ask()
    assert again[0] == pids[0] and again[1] not in pids

    async def batch():
        await asyncio.sleep(1)
        os.kill(pids[0], signal.SIGSTOP)
        while guard.restarted < 2:
            await asyncio.sleep(0.1)
        return "complete"

    began = time.monotonic()
    assert asyncio.run(guard.wait_batch(batch(), 1, time.monotonic())) == "complete"
    assert time.monotonic() - began < 1 + INTERRUPT_S + 10
