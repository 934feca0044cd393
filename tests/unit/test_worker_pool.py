"""A worker that dies is replaced, its samples are requeued, and whoever waits goes on waiting."""

import asyncio

import pytest
from ray.exceptions import RayActorError

from recipe.partial_rollout.rollout.worker_pool import WorkerLostError, WorkerPool


class Method:
    def __init__(self, function):
        self._function = function

    def remote(self, *args):
        return self._function(*args)


class Reference:
    """Can be awaited again and again, like Ray's; giving up one wait leaves the others."""

    def __init__(self, future):
        self._future = future

    def __await__(self):
        return asyncio.shield(self._future).__await__()


class FakeWorker:
    """Actor handle whose ``serve`` ends when it is told to."""

    def __init__(self):
        self.ended = asyncio.get_running_loop().create_future()
        self.asked = []
        self.serve = Method(lambda: Reference(self.ended))
        self.open_round = Method(lambda: self._answer("open"))
        self.close_round = Method(lambda: self._answer("close"))

    def end(self, error):
        self.ended.set_exception(error)
        # Not every test asks for it, and asyncio would complain when pytest has gone.
        self.ended.exception()

    async def _answer(self, what):
        if self.ended.done():
            raise RayActorError
        self.asked.append(what)
        return what


def pool_of(count, restarts=1):
    connected, released, workers = [], [], [FakeWorker() for _ in range(count)]

    async def connect(i, name, worker):
        connected.append(name)

    async def release(name):
        released.append(name)
        return 3

    pool = WorkerPool(workers, lambda i: FakeWorker(), connect, restarts, deadline_s=5.0)
    return pool, workers, connected, released, release


def test_dead_worker_is_replaced_under_a_new_name_and_its_samples_are_released():
    async def run():
        pool, workers, connected, released, release = pool_of(2)
        await pool.start()
        await pool.open_round()
        main = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(pool.while_serving(main, "the round", release))
        await asyncio.sleep(0)
        dead = workers[1]
        dead.end(RayActorError())
        await asyncio.sleep(0.05)
        assert not waiting.done() and workers[1] is not dead
        assert connected == ["agent_loop_worker_0", "agent_loop_worker_1", "agent_loop_worker_1.2"]
        assert released == ["agent_loop_worker_1"] and pool.restarted == 1
        assert workers[1].asked == ["open"]
        main.set_result("complete")
        assert await waiting == "complete"

    asyncio.run(run())


def test_worker_that_dies_once_too_often_ends_the_wait_by_name():
    async def run():
        pool, workers, *_, release = pool_of(1, restarts=0)
        await pool.start()
        workers[0].end(RayActorError())
        with pytest.raises(WorkerLostError, match=r"agent_loop_worker_0 died during the round.*worker_restarts=0"):
            await pool.while_serving(asyncio.sleep(5), "the round", release)

    asyncio.run(run())


def test_worker_that_fails_is_not_taken_for_dead():
    async def run():
        pool, workers, *_, release = pool_of(1)
        await pool.start()
        workers[0].end(ValueError("a mistake"))
        with pytest.raises(WorkerLostError, match="failed during the round: ValueError: a mistake"):
            await pool.while_serving(asyncio.sleep(5), "the round", release)

    asyncio.run(run())


def test_question_to_all_is_answered_by_those_that_live():
    async def run():
        pool, workers, *_ = pool_of(2)
        await pool.start()
        workers[0].end(RayActorError())
        assert await pool.ask("close_round") == ["close"]

    asyncio.run(run())


def test_error_of_what_is_awaited_comes_through():
    async def run():
        pool, *_, release = pool_of(1)
        await pool.start()

        async def fails():
            raise KeyError("round")

        with pytest.raises(KeyError, match="round"):
            await pool.while_serving(fails(), "the round", release)

    asyncio.run(run())
