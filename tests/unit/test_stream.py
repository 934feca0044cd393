"""Separate placement on the driver: batches come from a rollout that goes on. Real manager and worker, scripted engine."""

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
from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.rollout import stream as stream_module
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.round_parts import RoundParts
from recipe.partial_rollout.rollout.split_calls import SplitCalls
from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining
from recipe.partial_rollout.rollout.stream import Stream, StreamState
from recipe.partial_rollout.rollout.sync_frame import HeldReplicas
from recipe.partial_rollout.worker.replica_choice import ReplicaChoice
from tests.bench.scripted_engine import ScriptedWorker

CURVE = EngineCurve(step_s=0.001, sample_s=0.0)
STEPS = 4


class Local:
    """An actor handle without Ray."""

    def __init__(self, actor):
        self.actor = actor

    def __getattr__(self, verb):
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(getattr(self.actor, verb)(*args)))


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

    async def ask(self, verb):
        return [] if verb == "__ray_ready__" else await asyncio.gather(*self.begin(verb))

    async def ended(self):
        await asyncio.sleep(1e6)

    async def take_calls(self):
        taken, self.calls = tuple(self.calls), []
        return taken


class Control:
    """A ``ServerControl`` of the worker's scripted replicas; notes what it is asked."""

    def __init__(self, worker, asked):
        self.worker, self.asked = worker, asked

    async def interrupt(self):
        self.asked.append("interrupt")
        self.worker.interrupt()

    async def resume(self):
        self.asked.append("resume")

    async def hold(self):
        self.asked.append("hold")

    async def restart_dead(self):
        self.asked.append("restart_dead")

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
    """Trace, ledger, book, slots, roster and trainers: whoever is told, in order."""

    def __init__(self):
        self.trained, self.phases, self.booked = [], [], []

    def begin(self, step):
        pass

    def phase(self, name, step, start, end):
        self.phases.append((name, step))

    def note(self, played):
        self.booked.append(played)
        return {"length/bias": 1.0}

    def trained_groups(self, step, version, groups):
        self.trained.append([group.uid for group in groups])

    async def nothing(self, *_):
        return {}

    async def look(self, what):
        await asyncio.sleep(1e6)


class Life:
    """A trainer's life with its stream: ``STEPS`` steps of one group of one sample, overlap 1."""

    def __init__(self, lengths, *, last_step=STEPS, calls=()):
        self.asked, self.notes = [], Notes()
        admission = Admission(Mode.WINDOW, 1, 1, 1.0, 2, 2, max_staleness=4)
        self.manager = ManagerActor(admission, Scheduling(), stall_s=20.0)
        self.worker = ScriptedWorker(CURVE, 1, Placement.SEPARATE)
        self.source, self.stop = Source(lengths), StopSignals()
        self.control = Control(self.worker, self.asked)
        deadlines = SimpleNamespace(interrupt_s=5.0, stall_s=20.0, weight_sync_s=5.0)
        settings = SimpleNamespace(
            deadlines=deadlines,
            batch_groups=1,
            group_filter=None,
            failures=SimpleNamespace(max_masked_fraction=0.0),
            dashboard=SimpleNamespace(progress_s=0),
        )
        notes = self.notes
        ledger = SimpleNamespace(trained=notes.trained_groups)
        context = SimpleNamespace(
            settings=settings,
            control=self.control,
            trace=notes,
            source=self.source,
            ledger=ledger,
            stop=self.stop,
            trainers=notes,
            last_step=last_step,
            engine_metrics=notes.nothing,
        )
        pool, others = Pool(self.worker, calls), SimpleNamespace(meet_new=notes.nothing, reckon=notes.nothing)
        guard = Guard(context, Local(self.manager), pool)
        self.calls = SplitCalls(pool, guard)
        parts = (context, Local(self.manager), InProcess(), pool, others, others, None, notes, guard)
        self.stream = Stream(RoundParts(*parts), self.calls)
        self.frame = HeldReplicas(self.control, self.stream)

    async def start(self):
        self.worker.connect("w0", Local(self.manager), 4, ReplicaChoice({}))
        self.serving = asyncio.create_task(self.worker.serve())
        await asyncio.sleep(0.01)
        self.worker.begin(0, time.monotonic())
        self.worker.close_round()
        self.stream.begin()
        await self.sync(0)

    async def sync(self, version):
        await self.frame.before(version)
        self.worker._version = version
        await self.frame.after(version)

    async def batch(self, step):
        return await asyncio.wait_for(self.stream.play(SimpleNamespace(meta_info={"global_steps": step})), 10)

    async def step(self, step):
        """A step of verl's ``fit``."""
        groups = await self.batch(step)
        await self.stream.finish_round()
        await self.sync(step)
        return groups


@pytest.fixture(autouse=True)
def batches_are_groups(monkeypatch):
    monkeypatch.setattr(stream_module, "fill_slots", lambda context, groups, slots: groups)


def lived(body):
    async def life():
        try:
            return await asyncio.wait_for(body(), 30)
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    return asyncio.run(life())


def test_each_version_trains_one_batch_and_no_engine_is_interrupted():
    async def body():
        life = Life([5, 5, 5, 5])
        await life.start()
        for step in range(1, STEPS + 1):
            await life.step(step)
        return life

    life = lived(body)
    assert life.notes.trained == [[f"0/{i}"] for i in range(STEPS)]
    assert "interrupt" not in life.asked and life.asked.count("hold") == STEPS + 1


def test_sample_runs_on_while_the_trainer_updates_and_loads():
    async def body():
        life = Life([5, 400, 5, 5])
        await life.start()
        await life.batch(1)
        replica = life.worker._scripted[0]
        (running,) = replica._waiting.values()
        await asyncio.sleep(0.05)
        await life.stream.finish_round()
        await life.sync(1)
        still = running in replica._waiting.values()
        (group,) = await life.batch(2)
        return still, group.uid, life.asked

    still, uid, asked = lived(body)
    assert still and uid == "0/2" and "interrupt" not in asked


def test_version_begins_once_all_engines_have_loaded_and_before_they_go_on():
    async def body():
        life = Life([5, 5, 5, 5])
        await life.start()
        await life.batch(1)
        await life.stream.finish_round()
        life.asked.clear()
        await life.frame.before(1)
        held, version = list(life.asked), life.manager._manager.version
        await life.frame.after(1)
        return held, version, life.manager._manager.version, life.asked

    held, before, after, asked = lived(body)
    assert held == ["restart_dead", "hold", "restart_dead"] and (before, after) == (0, 1)
    assert asked[-1] == "resume"


def test_nothing_runs_before_the_training_begins():
    async def body():
        life = Life([5, 5])
        await life.sync(0)
        with pytest.raises(RuntimeError, match="the rollout is ready, not running: no batch can complete"):
            await life.batch(1)
        return life.source.left

    assert lived(body) == 2


def test_last_step_begins_no_version():
    async def body():
        life = Life([5, 5, 5, 5], last_step=2)
        await life.start()
        for step in (1, 2):
            await life.step(step)
        return life.manager._manager

    manager = lived(body)
    assert manager.version == 1 and manager.counters.admitted_groups == 3, "2 with version 0 and 1 with version 1"


def test_next_batch_and_the_figures_wait_for_the_update():
    async def body():
        life = Life([5, 5, 5, 5])
        await life.start()
        await life.batch(1)
        with pytest.raises(RuntimeError, match="step 1 is not trained: it is too early for the next batch"):
            await life.batch(2)
        with pytest.raises(RuntimeError, match="too early for its figures"):
            life.stream.take_step_metrics()
        with pytest.raises(RuntimeError, match="too early for a checkpoint"):
            await life.stream.save(None)
        await life.stream.finish_round()
        with pytest.raises(RuntimeError, match="the trainer has no batch: there is nothing to finish"):
            await life.stream.finish_round()
        return life.stream.take_step_metrics()

    assert lived(body) == {"length/bias": 1.0, "failures/workers_restarted_total": 0}


def test_hold_of_a_sync_is_a_figure_of_its_step_and_a_phase_of_its_version():
    async def body():
        life = Life([5, 5, 5, 5])
        await life.start()
        life.stream.take_step_metrics()
        await life.step(1)
        return life.stream.take_step_metrics(), life.notes.phases

    figures, phases = lived(body)
    assert 0 <= figures["timing/hold_s"] < 5 and ("hold", 1) in phases


def test_checkpoint_holds_every_token_and_the_samples_run_on(tmp_path):
    async def body():
        life = Life([5, 300, 5, 5])
        await life.start()
        await life.batch(1)
        await asyncio.sleep(0.05)
        await life.stream.finish_round()
        await life.stream.save(tmp_path / "manager")
        made = life.worker.decoded()
        await life.sync(1)
        trained = [group.uid for step in (2, 3, 4) for group in await life.step(step)]
        restored = Life([]).manager
        await restored.load(str(tmp_path / "manager"))
        return life, made, restored._manager.cached_tokens, trained

    life, made, restored, trained = lived(body)
    assert made == 5 + restored and restored > 0
    assert sorted(trained) == ["0/1", "0/2", "0/3"]
    assert life.asked.count("interrupt") == 1 and ("flush", 1) in life.notes.phases
    assert life.stream._state is StreamState.RUNNING


def test_stop_while_the_trainer_waits_leaves_the_engines_quiet_and_the_tokens_with_the_manager(tmp_path):
    async def body():
        life = Life([3000, 3000, 5, 5])
        await life.start()
        life.stop._number = 15
        with pytest.raises(StopTraining):
            await life.batch(1)
        await life.stream.save(tmp_path / "manager")
        return life

    life = lived(body)
    assert life.asked.count("interrupt") == 1 and life.stream._state is StreamState.STOPPED
    assert len(life.worker._scripted[0]) == 0
    assert life.manager._manager.cached_tokens == life.worker.decoded() > 0


def test_end_of_training_interrupts_what_still_runs():
    async def body():
        life = Life([5, 3000, 5, 5], last_step=1)
        await life.start()
        await life.step(1)
        await life.stream.end()
        await life.stream.end()
        return life

    life = lived(body)
    assert life.asked.count("interrupt") == 1 and len(life.worker._scripted[0]) == 0


def test_calls_of_training_samples_wait_for_their_step_and_validation_gets_its_own():
    def call(sample):
        return EngineCall("r0", 0.0, 1.0, 1, 0, sample=sample)

    async def body():
        life = Life([5], calls=[call("0/0#0"), call("a4f0"), call("probe-7")])
        others = await life.calls.take_others()
        life.stream._batch = None
        return others, await life.calls.take_training(), await life.calls.take_others()

    others, training, left = lived(body)
    assert [c.sample for c in others] == ["a4f0", "probe-7"]
    assert [c.sample for c in training] == ["0/0#0"] and left == ()


def test_step_is_booked_from_the_batch_before_to_this_one():
    async def body():
        life = Life([5, 5, 5, 5])
        await life.start()
        for step in (1, 2):
            await life.step(step)
        return life.notes.booked

    first, second = lived(body)
    assert first.phase.end == second.phase.start and 0 <= second.waits["wait_s"] <= second.phase.seconds
    assert [first.step, second.step] == [1, 2] and first.admitted == ("0/0", "0/1") and second.admitted == ("0/2",)
