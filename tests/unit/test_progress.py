"""The line about a round that goes on: what it says, where it goes, and that it never disturbs the round."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.messages import Standing
from recipe.partial_rollout.manager.types import Prompt
from recipe.partial_rollout.rollout import progress
from recipe.partial_rollout.rollout.progress import Glimpse, ProgressLine
from recipe.partial_rollout.waits import beside


class Engines:
    """Replicas that decode ten tokens between two questions."""

    def __init__(self, fails=False):
        self.asked, self.fails = 0, fails

    async def load(self):
        self.asked += 1
        if self.fails:
            raise TimeoutError("no answer")
        return {"a": (3, 10 * self.asked)}


SETTINGS = SimpleNamespace(batch_groups=4)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A log gets its lines sooner."""
    monkeypatch.setattr(progress, "_LOG_S", 0.02)


def lines_of(watch, seconds, monkeypatch):
    """What ``watch`` prints while a round takes ``seconds``."""
    lines = []
    monkeypatch.setattr(progress.tqdm, "write", lines.append)

    async def round_():
        await asyncio.sleep(seconds)
        return "batch"

    assert asyncio.run(beside(round_(), watch.show(5, time.monotonic()))) == "batch"
    return lines


def test_many_replicas_are_summed_up():
    load = {str(i): (100 + i, 0) for i in range(16)}
    line = Glimpse(3, 64, 12.6, None, load, None).line
    assert line == "step 3 | running 1720 on 16 replicas (100 to 115) | 13 s"


def test_a_log_gets_a_line_every_so_often(monkeypatch):
    async def standing():
        return Standing(ready_groups=2, running=3, oldest=1)

    lines = lines_of(ProgressLine(SETTINGS, Engines(), standing), 0.15, monkeypatch)
    assert 2 <= len(lines) <= 7
    assert all(line.startswith("step 5 | 2 of 4 groups ready | running 3 | ") for line in lines)
    assert all(" tok/s | oldest 1 version | " in line for line in lines)


def test_nopr_is_shown_without_a_manager(monkeypatch):
    lines = lines_of(ProgressLine(SETTINGS, Engines()), 0.1, monkeypatch)
    assert lines and all("ready" not in line and "oldest" not in line for line in lines)


def test_a_round_goes_on_while_nobody_answers(monkeypatch):
    lines = lines_of(ProgressLine(SETTINGS, Engines(fails=True)), 0.1, monkeypatch)
    assert lines and all(line.endswith("0 s") and "running" not in line for line in lines)


async def test_a_failed_round_raises_and_ends_the_watch(monkeypatch):
    engines = Engines()

    async def round_():
        await asyncio.sleep(0.05)
        raise RuntimeError("stalled")

    monkeypatch.setattr(progress.tqdm, "write", lambda line: None)
    with pytest.raises(RuntimeError, match="stalled"):
        await beside(round_(), ProgressLine(SETTINGS, engines).show(1, time.monotonic()))
    asked = engines.asked
    await asyncio.sleep(0.05)
    assert engines.asked == asked > 0


def test_a_terminal_has_one_line_that_is_taken_away(monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "_TERMINAL_S", 0.02)
    watch = ProgressLine(SETTINGS, Engines())
    asyncio.run(beside(asyncio.sleep(0.1), watch.show(5, time.monotonic())))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "step 5 | running 3 | " in printed.err
    assert printed.err.count("\n") == printed.err.count("\x1b[A"), "each step down is taken back: one line in place"
    assert watch._line._bar is None


async def test_the_manager_says_how_far_the_round_is():
    actor = ManagerActor(Admission(Mode.WINDOW, 1, 2, 1.0, 2, 2, max_staleness=4), Scheduling(), 60.0)
    assert await actor.standing() == Standing(0, 0, 0)
    await actor.register_worker("w0", 3)
    await actor.begin_version(3, [Prompt(f"0/{i}", 0, {}) for i in range(3)], 0)
    granted = await actor.claim("w0")
    assert await actor.standing() == Standing(ready_groups=0, running=len(granted), oldest=0)
    actor._manager._state.version = 5
    assert (await actor.standing()).oldest == 2
