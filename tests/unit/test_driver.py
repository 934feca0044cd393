"""A training's life with its driver, in both placements: real manager and worker, scripted engine."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.config.choices import Mode, Placement
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.output_store import InProcess
from recipe.partial_rollout.manager.types import Prompt
from recipe.partial_rollout.planner.engine_curve import EngineCurve
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.rollout.driver import Driver, RolloutState
from recipe.partial_rollout.rollout.engine_probe import EndedCalls
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining
from recipe.partial_rollout.worker.replica_choice import ReplicaChoice
from tests.bench.scripted_engine import ScriptedWorker
from tests.unit.shared import Local

CURVE = EngineCurve(step_s=0.001, sample_s=0.0)
STEPS = 4
both = pytest.mark.parametrize("placement", list(Placement))


class Pool:
    """A ``WorkerPool`` of one worker, in which nobody dies."""

    restarted = 0

    def __init__(self, worker, calls=()):
        self.worker, self.calls = worker, list(calls)

    async def open_round(self):
        self.worker.open_round()

    async def close_round(self):
        self.worker.close_round()

    def begin(self, verb):
        return [asyncio.ensure_future(getattr(self.worker, verb)())]

    async def answers(self, verb, asked):
        return await asyncio.gather(*asked)

    async def ask(self, verb):
        if verb == "take_calls":
            taken, self.calls = self.calls, []
            return [taken]
        return []

    async def ended(self):
        await asyncio.sleep(1e6)


class Control:
    """A ``ServerControl`` of the worker's scripted replicas; notes what it is asked."""

    def __init__(self, worker, asked):
        self.worker, self.asked = worker, asked

    def __getattr__(self, verb):
        async def note():
            self.asked.append(verb)

        return note

    async def interrupt(self):
        self.asked.append("interrupt")
        self.worker.interrupt()

    async def running_tokens(self):
        return {}


class Source:
    """Prompts of one sample each."""

    def __init__(self, lengths):
        self.prompts = [Prompt(f"0/{i}", 0, {"lengths": [length]}) for i, length in enumerate(lengths)]

    @property
    def left(self):
        return len(self.prompts)

    def take(self, count):
        taken, self.prompts = self.prompts[:count], self.prompts[count:]
        return taken


class Notes:
    """Trace, book, shares and roster: whoever is told, in order."""

    def __init__(self):
        self.phases, self.booked = [], []

    def begin(self, step):
        pass

    def phase(self, name, step, start, end):
        self.phases.append((name, step))

    def note(self, batch, account, calls):
        self.booked.append(batch)
        return {"length/bias": 1.0}

    async def nothing(self, *_):
        return {}

    @property
    def trained(self):
        return [uid for batch in self.booked for uid in batch.uids]


class Life:
    """``STEPS`` steps of one group of one sample, overlap 1."""

    def __init__(self, lengths, placement=Placement.SEPARATE, *, last_step=STEPS, calls=()):
        self.asked, self.notes, self.separate = [], Notes(), placement is Placement.SEPARATE
        admission = Admission(Mode.WINDOW, 1, 1, 1.0, 2, 2, max_staleness=4)
        self.manager = ManagerActor(admission, Scheduling(), stall_s=20.0)
        self.worker = ScriptedWorker(CURVE, 1, placement)
        self.source, self.stop = Source(lengths), StopSignals()
        self.control = Control(self.worker, self.asked)
        settings = SimpleNamespace(
            deadlines=SimpleNamespace(interrupt_s=5.0, stall_s=20.0, weight_sync_s=5.0),
            batch_groups=1,
            group_filter=None,
            separate=self.separate,
            failures=SimpleNamespace(max_masked_fraction=0.0),
        )
        notes = self.notes
        context = SimpleNamespace(
            settings=settings,
            control=self.control,
            trace=notes,
            source=self.source,
            stop=self.stop,
            trainers=[],
            last_step=last_step,
            engine_metrics=notes.nothing,
        )
        manager, pool = Local(self.manager), Pool(self.worker, calls)
        guard = Guard(context, manager, pool)
        self.calls = EndedCalls(guard.ask)
        others = SimpleNamespace(announce_restarted=notes.nothing, reckon=notes.nothing)
        self.driver = Driver(
            context, manager, InProcess(), pool, others, others, self.calls, notes, overlap=None, guard=guard
        )

    async def start(self):
        self.worker.connect("w0", Local(self.manager), 4, ReplicaChoice({}))
        self.serving = asyncio.create_task(self.worker.serve())
        await asyncio.sleep(0.01)
        self.worker.begin(0, time.monotonic())
        self.worker.close_round()
        self.driver.begin()
        await self.sync(0)

    async def sync(self, version):
        await self.driver.before_load(version)
        self.worker._version = version
        if not self.separate:
            for replica in self.worker._scripted:
                replica.start()
        await self.driver.after_load(version)

    async def batch(self, step):
        return await asyncio.wait_for(self.driver.next_batch(step), 10)

    async def step(self, step):
        """A step of verl's ``fit``."""
        groups = await self.batch(step)
        await self.driver.finish_step()
        await self.sync(step)
        return groups


def lived(body, *lengths, started=True, **options):
    """``body`` of a life over prompts of ``lengths``; what the life is like afterwards, and what ``body`` returned."""

    async def run():
        try:
            life = Life(lengths, **options)
            if started:
                await life.start()
            return life, await asyncio.wait_for(body(life), 30)
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    return asyncio.run(run())


@both
def test_batch_its_figures_a_checkpoint_and_validation_wait_for_the_update(placement):
    async def body(life):
        await life.batch(1)
        driver = life.driver
        for too_early in (lambda: life.batch(2), lambda: driver.save(None), driver.before_validation):
            with pytest.raises(RuntimeError, match="step 1 is not trained: it is too early for"):
                await too_early()
        with pytest.raises(RuntimeError, match="too early for its figures"):
            driver.take_step_metrics()
        await driver.finish_step()
        with pytest.raises(RuntimeError, match="the trainer has no batch: there is nothing to finish"):
            await driver.finish_step()
        return driver.take_step_metrics()

    _, figures = lived(body, 5, 5, 5, 5, placement=placement)
    assert figures.pop("timing/hold_s", 0) >= 0
    assert figures == {"length/bias": 1.0, "failures/workers_restarted_total": 0}


@both
def test_last_step_begins_no_version_and_the_end_interrupts_what_still_runs(placement):
    async def body(life):
        await life.step(1)
        await life.driver.end()
        await life.driver.end()

    life, _ = lived(body, 5, 3000, 5, 5, placement=placement, last_step=1)
    manager = life.manager._manager
    assert manager.version == 0 and manager.counters.admitted_groups == 2
    assert life.asked.count("interrupt") == 1 and len(life.worker._scripted[0]) == 0


@both
def test_checkpoint_holds_every_token_and_the_samples_run_on(tmp_path, placement):
    async def body(life):
        await life.batch(1)
        await asyncio.sleep(0.05)
        await life.driver.finish_step()
        await life.driver.save(tmp_path / "manager")
        made = life.worker.decoded()
        await life.sync(1)
        for step in (2, 3, 4):
            await life.step(step)
        restored = Life([]).manager
        await restored.load(str(tmp_path / "manager"))
        return made, restored._manager.groups.cached_tokens

    life, (made, restored) = lived(body, 5, 300, 5, 5, placement=placement)
    assert made == 5 + restored and restored > 0
    assert sorted(life.notes.trained) == ["0/0", "0/1", "0/2", "0/3"]
    assert life.asked.count("interrupt") == (1 if life.separate else STEPS)
    if life.separate:
        assert ("flush", 1) in life.notes.phases and life.driver._state is RolloutState.RUNNING


@both
def test_stop_while_the_trainer_waits_leaves_the_engines_quiet_and_the_tokens_with_the_manager(tmp_path, placement):
    async def body(life):
        life.stop._number = 15
        with pytest.raises(StopTraining):
            await life.batch(1)
        await life.driver.save(tmp_path / "manager")

    life, _ = lived(body, 3000, 3000, 5, 5, placement=placement)
    assert life.asked.count("interrupt") == 1 and life.driver._state is RolloutState.QUIET
    assert len(life.worker._scripted[0]) == 0
    assert life.manager._manager.groups.cached_tokens == life.worker.decoded() > 0


def test_colocated_version_begins_while_the_trainer_updates_and_its_samples_wait_for_the_weights():
    async def body(life):
        await life.batch(1)
        await asyncio.sleep(0.05)
        assert len(life.worker._scripted[0]) == 0 and life.manager._manager.version == 1 and life.worker.ready() == 2
        await life.driver.finish_step()

    life, _ = lived(body, 5, 300, 5, 5, placement=Placement.COLOCATED)
    waits = life.notes.booked[0].waits
    assert set(waits) == {"resume_s", "interrupt_s", "collect_s", "flush_s"} and all(s >= 0 for s in waits.values())


def test_separate_sample_runs_on_while_the_trainer_updates_and_loads():
    async def body(life):
        await life.batch(1)
        waiting = life.worker._scripted[0]._waiting
        (running,) = waiting.values()
        await asyncio.sleep(0.05)
        await life.driver.finish_step()
        await life.sync(1)
        assert running in waiting.values()
        return await life.batch(2)

    life, (group,) = lived(body, 5, 400, 5, 5)
    assert group.uid == "0/2" and "interrupt" not in life.asked


def test_separate_version_begins_once_all_engines_have_loaded_and_before_they_go_on():
    async def body(life):
        await life.batch(1)
        with pytest.raises(RuntimeError, match="step 1 is not trained: it is too early for policy version 1"):
            await life.driver.after_load(1)
        await life.driver.finish_step()
        life.asked.clear()
        await life.driver.before_load(1)
        assert life.asked == ["restart_dead", "hold", "restart_dead"] and life.manager._manager.version == 0
        await life.driver.after_load(1)

    life, _ = lived(body, 5, 5, 5, 5)
    assert life.manager._manager.version == 1 and life.asked[-1] == "resume" and life.notes.phases[-1] == ("hold", 1)


def test_nothing_runs_before_the_training_begins():
    async def body(life):
        await life.sync(0)
        with pytest.raises(RuntimeError, match="the rollout is quiet, not running: no batch can complete"):
            await life.batch(1)

    assert lived(body, 5, 5, started=False)[0].source.left == 2


def test_calls_of_training_samples_wait_for_their_step_and_validation_gets_its_own():
    async def body(life):
        return await life.calls.take_others(), await life.calls.take_training(), await life.calls.take_others()

    calls = [EngineCall("r0", 0.0, 1.0, 1, 0, sample=sample) for sample in ("0/0#0", "a4f0", "probe-7")]
    _, (others, training, left) = lived(body, 5, started=False, calls=calls)
    assert [c.sample for c in others] == ["a4f0", "probe-7"]
    assert [c.sample for c in training] == ["0/0#0"] and left == ()


def test_separate_step_is_booked_from_the_batch_before_to_this_one():
    async def body(life):
        for step in (1, 2):
            await life.step(step)

    first, second = lived(body, 5, 5, 5, 5)[0].notes.booked
    assert first.until == second.since and 0 <= second.waits["wait_s"] <= second.until - second.since
    assert [first.step, second.step] == [1, 2] and first.admitted == ("0/0", "0/1") and second.admitted == ("0/2",)
