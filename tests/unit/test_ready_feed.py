"""The trainer computes groups that are ready while it waits for its batch, and is idle again when it has it."""

import asyncio
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.partial_rollout.manager.output_store import InProcess
from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.rollout.ready_feed import ReadyFeed
from recipe.partial_rollout.rollout.stop import StopTraining


class Manager:
    """Tells groups as they are put in; None ends the telling."""

    def __init__(self):
        self.told, self.known = asyncio.Queue(), []
        self.reasons = []
        self.ready_groups = SimpleNamespace(remote=self._ready_groups)
        self.abandon = SimpleNamespace(remote=self._abandon)

    async def _abandon(self, reason):
        self.reasons.append(reason)

    async def _ready_groups(self, known, least):
        self.known.append((list(known), least))
        return await self.told.get()


class Passes:
    """Notes the rows of each pass; a pass lasts until ``go``."""

    least_groups = 2

    def __init__(self, error=None):
        self.rows, self.begun, self.error, self.go = [], 0, error, threading.Event()

    def begin(self):
        self.begun += 1

    def run(self, rows):
        assert self.go.wait(5)
        if self.error is not None:
            raise self.error
        self.rows.append(rows.batch["responses"][:, 0].tolist())


class Trainers:
    async def alive_during(self, awaitable, what):
        return await awaitable


class Life:
    def __init__(self, passes):
        self.manager, self.passes, self.phases = Manager(), passes, []
        context: Any = SimpleNamespace(
            early_passes=passes,
            sizes=SimpleNamespace(prompt=4, response=3),
            pad_id=0,
            trainers=Trainers(),
            trace=SimpleNamespace(phase=lambda name, step, start, end: self.phases.append((name, step))),
        )
        self.feed = ReadyFeed(context, self.manager, InProcess())

    def tell(self, output, *tokens):
        groups = [TakenGroup(f"0/{token}", token, 0, {}, (output(1, token=token),)) for token in tokens]
        self.manager.told.put_nowait(groups)


@pytest.fixture
def output(output):
    def make(length, *, token):
        made = output(length)
        return replace(made, response_ids=made.response_ids * 0 + token)

    return make


def lived(body):
    return asyncio.run(asyncio.wait_for(body(), 10))


async def soon():
    await asyncio.sleep(0.05)


def test_groups_are_computed_in_the_number_that_the_passes_take(output):
    async def body():
        life = Life(Passes())
        life.passes.go.set()
        async with life.feed.during(3):
            life.tell(output, 5, 6, 7)
            await soon()
            life.tell(output, 7, 8)
            await soon()
        return life

    life = lived(body)
    assert life.passes.begun == 1 and life.passes.rows == [[5, 6], [7, 8]]
    assert life.manager.known == [([], 2), (["0/5", "0/6"], 2), (["0/5", "0/6", "0/7", "0/8"], 2)]
    assert life.phases == [("early_pass", 3), ("early_pass", 3)]


def test_trainer_is_idle_again_when_the_wait_is_over(output):
    async def body():
        life = Life(Passes())
        threading.Timer(0.2, life.passes.go.set).start()
        async with life.feed.during(1):
            life.tell(output, 5, 6)
            await soon()
            running = list(life.passes.rows)
        return running, life.passes.rows

    assert lived(body) == ([], [[5, 6]])


def test_no_pass_begins_after_the_wait(output):
    async def body():
        life = Life(Passes())
        life.passes.go.set()
        async with life.feed.during(1):
            await soon()
        life.tell(output, 5, 6)
        await soon()
        return life.passes.rows

    assert lived(body) == []


def test_feed_ends_when_nothing_more_is_to_come(output):
    async def body():
        life = Life(Passes())
        life.manager.told.put_nowait([])
        life.manager.told.put_nowait(None)
        async with life.feed.during(1):
            await soon()
        return life.manager.known

    assert lived(body) == [([], 2), ([], 2)]


def test_error_of_a_pass_ends_the_wait(output):
    told = []

    async def body():
        life = Life(Passes(error=MemoryError("no room")))
        life.passes.go.set()
        async with life.feed.during(1):
            life.tell(output, 5, 6)
            await soon()
            told.extend(life.manager.reasons)

    with pytest.raises(MemoryError, match="no room"):
        lived(body)
    assert told == ["a forward pass over ready groups failed: MemoryError: no room"]


def test_users_stop_wins_over_the_error_of_a_pass(output):
    async def body():
        life = Life(Passes(error=MemoryError("no room")))
        threading.Timer(0.1, life.passes.go.set).start()
        async with life.feed.during(1):
            life.tell(output, 5, 6)
            await soon()
            raise StopTraining(signal.SIGTERM)

    with pytest.raises(StopTraining):
        lived(body)


def test_nothing_is_asked_where_passes_run_on_the_whole_batch():
    async def body():
        life = Life(None)
        async with life.feed.during(1):
            await soon()
        return life.manager.known

    assert lived(body) == []
