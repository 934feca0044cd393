"""A training's life with its driver, in both placements: real manager and worker, scripted engine."""

import asyncio
import contextlib
import time
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import DEFAULT, AsyncMock, MagicMock

import pytest

from recipe.partial_rollout.config.settings import Placement
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.types import Prompt
from recipe.partial_rollout.records.run_log import EngineCall, Phase
from recipe.partial_rollout.rollout import driver
from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.prompt_source import TrainingSteps
from recipe.partial_rollout.rollout.recorder import Recorder
from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining
from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve
from tests.bench.scripted_engine import ScriptedWorker
from tests.unit.shared import InProcess, Local, settings_of, tokens_in

STEPS = 4
both = pytest.mark.parametrize("placement", list(Placement))


class Calm(Guard):
    """A guard of one worker, in which nobody dies."""

    calls = ()

    async def set_gate(self, *, open):
        self.open = open
        self._workers[0].open_round() if open else self._workers[0].close_round()

    async def ask(self, verb):
        if verb == "flush":
            return [await self._workers[0].flush()]
        return [self.calls] if verb == "take_calls" else []

    async def follow_lengths(self, calls):
        """Its slots stay as they are."""


class Records(Recorder):
    """Keeps the batches that are recorded."""

    def batch(self, *given):
        vars(self).setdefault("batches", []).append(given)
        super().batch(*given)

    async def engines(self):
        pass


class Source:
    """Prompts of one sample each."""

    def __init__(self, lengths):
        self.prompts = [Prompt(f"0/{i}", {"lengths": [length]}) for i, length in enumerate(lengths)]

    @property
    def left(self):
        return len(self.prompts)

    def take(self, count):
        taken, self.prompts = self.prompts[:count], self.prompts[count:]
        return taken


class Life:
    """``STEPS`` steps of one group of one sample, overlap 1."""

    def __init__(self, lengths, placement, last_step):
        settings = settings_of(stall_s=20.0, placement=placement)
        self.separate, self.manager = settings.separate, ManagerActor(settings, InProcess())
        self.worker = ScriptedWorker(EngineCurve(step_s=0.001, sample_s=0.0), 1, placement)
        self.source, self.stop, self.log = Source(lengths), StopSignals(), MagicMock()
        answers = {"load.return_value": {}, "interrupt.side_effect": self.worker.interrupt}
        self.control = AsyncMock(**answers, restarted=0)
        self.recorder = Records(settings, self.log, self.control, SimpleNamespace(total=1))
        manager, steps = Local(self.manager), TrainingSteps(last_step, 1, last_step)
        self.guard = Calm(self.recorder, manager, [self.worker], None, [], self.stop)
        self.driver = Driver(self.recorder, steps, self.source, manager, InProcess(), self.guard)

    async def start(self):
        self.worker.connect("w0", Local(self.manager), 4, {})
        self.serving = asyncio.create_task(self.worker.serve())
        await asyncio.sleep(0.01)
        self.worker.begin(0, time.monotonic())
        self.worker.close_round()
        await self.sync(0)

    async def sync(self, version):
        async with self.driver.loading(version):
            self.worker._version = version
            if not self.separate:
                for replica in self.worker._scripted:
                    replica.start()

    async def batch(self, step):
        return await asyncio.wait_for(self.driver.next_batch(step), 10)

    async def step(self, step):
        """A step of verl's ``fit``."""
        groups = await self.batch(step)
        await self.driver.finish_step()
        await self.sync(step)
        return groups

    @property
    def decoding(self):
        """Engine calls that run."""
        return len(self.worker._scripted[0])

    @property
    def recorded(self):
        """Batches of the steps that were finished."""
        return [batch for batch, *_ in self.recorder.batches]

    @property
    def phases(self):
        events = (call.args[0] for call in self.log.add.call_args_list)
        return [(event.name, event.step) for event in events if isinstance(event, Phase)]


@contextlib.asynccontextmanager
async def life(*lengths, placement=Placement.SEPARATE, last_step=STEPS):
    """A life over prompts of ``lengths``."""
    one = Life(lengths, placement, last_step)
    try:
        await one.start()
        yield one
    finally:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


@both
async def test_next_batch_checkpoint_and_sync_wait_for_the_update(placement):
    async with life(5, 5, 5, 5, placement=placement) as one:
        await one.batch(1)
        driver = one.driver
        for too_early in (lambda: one.batch(2), lambda: driver.save(None), lambda: one.sync(1)):
            with pytest.raises(RuntimeError, match="step 1 is not trained: it is too early for"):
                await too_early()
        await driver.finish_step()
        with pytest.raises(RuntimeError, match="the trainer has no batch: there is nothing to finish"):
            await driver.finish_step()


@both
async def test_checkpoint_holds_every_token_and_the_samples_run_on(tmp_path, placement):
    async with life(5, 300, 5, 5, placement=placement) as one:
        report = one.manager.report

        async def late(*given):
            await asyncio.sleep(0.1)
            return await report(*given)

        one.manager.report = late
        await one.batch(1)
        await asyncio.sleep(0.05)
        await one.driver.finish_step()
        await one.driver.save(tmp_path / "manager")
        made = one.worker.decoded()
        await one.sync(1)
        for step in (2, 3, 4):
            await one.step(step)
        restored = ManagerActor(settings_of(), InProcess())
        await restored.load(str(tmp_path / "manager"))
        assert made == 5 + tokens_in(restored._manager) > 5
        uids = [group.uid for batch in one.recorded for group in batch.ready.groups]
        admitted = [uid for _, summary, *_ in one.recorder.batches for uid in summary.admitted]
        assert sorted(uids) == admitted == ["0/0", "0/1", "0/2", "0/3"]
        assert one.control.interrupt.await_count == (1 if one.separate else STEPS)
        if one.separate:
            assert ("flush", 1) in one.phases and one.guard.open
            last = one.recorded[-1]
            assert 0 <= one.recorder.metrics["timing/wait_s"] <= last.until - last.since
            for before, after in pairwise(one.recorded):
                assert (after.step, after.since) == (before.step + 1, before.until)


@both
async def test_stop_in_a_round_leaves_engines_quiet_and_tokens_with_the_manager(tmp_path, placement):
    async with life(3000, 3000, 5, 5, placement=placement) as one:
        one.stop._number = 15
        with pytest.raises(StopTraining):
            await one.batch(1)
        await one.driver.save(tmp_path / "manager")
        assert one.control.interrupt.await_count == 1 and not one.guard.open
        assert one.decoding == 0 and tokens_in(one.manager._manager) == one.worker.decoded() > 0


async def test_colocated_version_begins_while_the_trainer_updates():
    async with life(5, 300, 5, 5, placement=Placement.COLOCATED) as one:
        await one.batch(1)
        await asyncio.sleep(0.05)
        assert one.decoding == 0 and one.manager._manager.version == 1
        assert one.worker.ready() == 2, "its samples wait for the weights"


async def test_separate_version_begins_between_the_load_and_the_resumption():
    async with life(5, 5, 5, 5) as one:
        await one.batch(1)
        await one.driver.finish_step()
        one.control.reset_mock()
        one.control.resume.side_effect = lambda: versions.append(one.manager._manager.version)
        versions = []
        async with one.driver.loading(1):
            assert [name for name, *_ in one.control.mock_calls] == ["restart_dead", "hold", "restart_dead"]
            assert one.manager._manager.version == 0
        assert versions == [1] and one.phases[-1] == ("hold", 1)


@both
async def test_last_step_begins_no_version_and_is_recorded_with_the_calls_of_training_samples_alone(placement):
    async with life(5, 3000, 5, 5, placement=placement, last_step=1) as one:
        samples = ("0/0#0", "a4f0", "a4f1")
        one.guard.calls = [EngineCall("r0", 0.0, 1.0, 1, 0, sample=sample) for sample in samples]
        await one.step(1)
        ((_, _, calls, _),) = one.recorder.batches
        assert [call.sample for call in calls] == ["0/0#0"]
        ((round_,), _) = one.log.round.call_args
        waits = round_.interrupt_s, round_.resume_s
        assert waits == (None, None) if one.separate else min(waits) >= 0
        assert one.recorder.metrics.get("timing/interrupt_s") == round_.interrupt_s
        assert one.recorder.metrics["rollout/decoded_tokens"] == 1
        manager = one.manager._manager
        assert manager.version == 0 and manager.counters.admitted_groups == 2


@both
async def test_manager_that_wants_prompts_gets_what_the_source_has(placement):
    async with life(5, 5, 5, 5, placement=placement) as one:
        one.manager.enqueue = AsyncMock(wraps=one.manager.enqueue)
        one.manager.wait_batch = AsyncMock(wraps=one.manager.wait_batch, side_effect=[False, DEFAULT])
        (group,) = await one.batch(1)
        (((prompts, left), _),) = one.manager.enqueue.await_args_list
        assert (group.uid, [prompt.uid for prompt in prompts], left) == ("0/0", ["0/2", "0/3"], 0)


async def test_first_error_of_each_kind_in_samples_is_a_warning_with_its_line(monkeypatch):
    monkeypatch.setattr(driver, "logger", told := MagicMock())
    async with life(5, 5, 5, 5, placement=Placement.COLOCATED) as one:
        runs, failed = one.worker._trained, []

        async def run(*args, **kwargs):
            if len(failed) < 2:
                failed.append(1)
                raise KeyError(len(failed))
            return await runs(*args, **kwargs)

        one.worker._trained = run
        await one.step(1)
        await one.step(2)
        ((text, *values),) = [given for given, _ in told.warning.call_args_list]
        warning = text % tuple(values)
        assert warning.startswith("in a sample of step 1, ") and "test_driver.py:" in warning
        assert warning.endswith("raised KeyError: 1 (the first of this kind; later ones are not shown)")
        error = RuntimeError("the run failed")
        await one.driver.explain(error)
        assert len(error.__notes__) == 1
