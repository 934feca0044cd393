"""What a terminal shows while a run goes on: a line about the round, which never disturbs it, and the recipe's warnings."""

import asyncio
import logging
import sys
import time
from math import inf, nan
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.manager.types import Standing
from recipe.partial_rollout.rollout import guard
from recipe.partial_rollout.rollout.guard import watch_round
from recipe.partial_rollout.training import step_log
from recipe.partial_rollout.training.step_log import KL, PolicyDrift, StepLog
from recipe.partial_rollout.waits import wait


@pytest.fixture(autouse=True)
def asked_often(monkeypatch):
    monkeypatch.setattr(guard, "LOOK_EVERY_S", 0.005)


async def beside(awaitable, engines, look=None):
    watching = watch_round(engines, 4, 5, time.monotonic(), look)
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


async def test_a_terminal_has_one_line_that_is_taken_away(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    # Bars of other tests may wait for a garbage collection.
    before = set(guard.tqdm._instances)
    await beside(asyncio.sleep(0.1), Engines())
    await asyncio.sleep(0)
    printed = capsys.readouterr()
    assert printed.out == "" and "step 5 | running 3 | " in printed.err
    assert printed.err.count("\n") == printed.err.count("\x1b[A"), "each step down is taken back: one line in place"
    assert set(guard.tqdm._instances) <= before


def test_recipes_warnings_reach_the_terminal_although_a_library_has_muted_the_root_logger(monkeypatch, capsys):
    ours = logging.getLogger("recipe.partial_rollout")
    for name in ("level", "handlers", "propagate"):
        monkeypatch.setattr(ours, name, getattr(ours, name))
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    main_ppo.show_warnings()
    logging.getLogger("recipe.partial_rollout.rollout.guard").warning("%s died", "agent_loop_worker_1")
    logging.getLogger("another.library").warning("its own affairs")
    assert capsys.readouterr().out.splitlines() == ["agent_loop_worker_1 died"]


# -- a policy that runs away from its samples ------------------------------------------------------------------------------


@pytest.mark.parametrize("enable", [True, False])
def test_drift_is_told_under_partial_rollout_alone_and_a_loss_that_is_no_number_in_both_arms(monkeypatch, enable):
    printed = []
    monkeypatch.setattr(step_log.tqdm, "write", printed.append)
    config = OmegaConf.create({"trainer": {"logger": ["file"]}, "actor_rollout_ref": {"rollout": {}}})
    log = StepLog(config, SimpleNamespace(enable=enable, separate=False), total_steps=20)
    for step in range(1, 12):
        log.extend({"training/global_step": step, KL: 1e-4}, step)
    log.extend({"training/global_step": 12, KL: 0.1, "actor/loss": nan}, 12)
    drift = [line for line in printed if "step 12 the policy has drifted" in line]
    assert [f"{KL} 0.1000, 0.00010 by the median" in line for line in drift] == [True] * enable
    assert all("lr_scheduler_type=cosine" in line for line in drift)
    assert any("actor/loss nan" in line and "step 12" in line for line in printed)


WELL = [0.0002] * 8


@pytest.mark.parametrize(
    ("values", "warned_at"),
    [
        ([*WELL, 0.0085, 0.0157, 0.0387], [9]),
        # Again only after it was over.
        ([*WELL, 0.0085, 0.0001, 0.0157], [9, 11]),
        # Large while much is learnt, and a floor below which factors mean nothing.
        ([0.0, 0.0002, 0.0009, 0.0007, 0.0002, 0.0001, 0.0001, 0.00001, 0.0019, 0.0005], []),
        # First steps, and a run that always was far off.
        ([0.02, 0.3, 0.02, 0.03, 0.02], []),
        ([0.02] * 10, []),
    ],
)
def test_drift_is_told_when_it_sets_in(values, warned_at):
    drift = PolicyDrift()
    assert [step for step, kl in enumerate(values, 1) if drift.observe({KL: kl}, step)] == warned_at


@pytest.mark.parametrize(("key", "value"), [(KL, inf), ("actor/grad_norm", nan), ("critic/vf_loss", -inf)])
def test_figure_that_is_not_finite_is_told_by_name_in_its_own_step_and_hides_no_later_drift(key, value):
    drift = PolicyDrift()
    assert not any(drift.observe({KL: 0.0005}, step) for step in range(7))
    data = {KL: 0.0005, "actor/entropy": 1.0, key: value}
    warning = step_log.not_finite(data, 7)
    assert warning is not None and "step 7" in warning and f"{key} {value}" in warning
    assert "actor/entropy" not in warning and drift.observe(data, 7) is None
    assert drift.observe({KL: 0.0005}, 8) is None
    assert drift.observe({KL: 0.5}, 9) is not None
