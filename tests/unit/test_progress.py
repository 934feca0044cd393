"""What a terminal shows while a run goes on: a line about the round, which never disturbs it, and the recipe's warnings."""

import asyncio
import logging
import sys
import time
from types import SimpleNamespace

import pytest

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.manager.types import Standing
from recipe.partial_rollout.rollout import guard
from recipe.partial_rollout.rollout.guard import watch_round
from recipe.partial_rollout.waits import wait


@pytest.fixture(autouse=True)
def asked_often(monkeypatch):
    monkeypatch.setattr(guard, "LOOK_EVERY_S", 0.005)


async def beside(awaitable, engines, look=None):
    session = SimpleNamespace(control=engines, settings=SimpleNamespace(batch_groups=4))
    watching = watch_round(session, 5, time.monotonic(), look)
    return await wait(awaitable, 10, "the round", None, watches=[watching])


class Engines:
    """Replicas that decode ten tokens between two questions, and answer them or not."""

    def __init__(self, answers=True):
        self.asked, self.answers = 0, answers

    async def load(self):
        self.asked += 1
        return {"a": (3, 10 * self.asked)} if self.answers else {}


@pytest.fixture
def lines(monkeypatch):
    """The lines of a log, which gets them sooner."""
    found = []
    monkeypatch.setattr(guard, "_LOG_S", 0.02)
    monkeypatch.setattr(guard.tqdm, "write", found.append)
    return found


async def standing(decoded):
    assert decoded
    return Standing(ready_groups=2, running=3, oldest=1)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((Engines(), standing), ("step 5 | 2 of 4 groups ready | running 3 | ", " tok/s | oldest 1 version | ")),
        ((Engines(),), ("step 5 | running 3 | ",)),
        ((Engines(answers=False),), ("step 5 | 0 s",)),
    ],
    ids=["PR", "noPR has no manager", "nobody answers"],
)
async def test_a_log_gets_a_line_every_so_often_while_the_round_goes_on(lines, asked, says):
    round_ = beside(asyncio.sleep(0.15, "batch"), *asked)
    assert await round_ == "batch" and 2 <= len(lines) <= 7
    assert all(line.startswith(says[0]) and says[-1] in line for line in lines)


async def test_a_failed_round_ends_the_watch(lines):
    engines = Engines()

    async def round_():
        await asyncio.sleep(0.05)
        raise RuntimeError("stalled")

    with pytest.raises(RuntimeError, match="stalled"):
        await beside(round_(), engines)
    asked = engines.asked
    await asyncio.sleep(0.05)
    assert engines.asked == asked > 0


async def test_a_terminal_has_one_line_that_is_taken_away(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    await beside(asyncio.sleep(0.1), Engines())
    await asyncio.sleep(0)
    printed = capsys.readouterr()
    assert printed.out == "" and "step 5 | running 3 | " in printed.err
    assert printed.err.count("\n") == printed.err.count("\x1b[A"), "each step down is taken back: one line in place"
    assert not guard.tqdm._instances


def test_recipes_warnings_reach_the_terminal_although_a_library_has_muted_the_root_logger(monkeypatch, capsys):
    ours = logging.getLogger("recipe.partial_rollout")
    for name in ("level", "handlers", "propagate"):
        monkeypatch.setattr(ours, name, getattr(ours, name))
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    main_ppo.show_warnings()
    logging.getLogger("recipe.partial_rollout.rollout.guard").warning("%s died", "agent_loop_worker_1")
    logging.getLogger("another.library").warning("its own affairs")
    assert capsys.readouterr().out.splitlines() == ["agent_loop_worker_1 died"]
