"""A training without verl and without engines: a real session, driver, manager and workers over scripted replicas."""

import asyncio
import sys
from dataclasses import replace

import numpy as np
import ray
from hydra import compose, initialize_config_dir
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints
from recipe.partial_rollout.config.settings import Deadlines, PartialRolloutConfig, Placement
from recipe.partial_rollout.manager.actor import ManagerActor, RayObjects
from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.session import RunSession, TrainingSteps
from recipe.partial_rollout.rollout.slots import ReplicaSlots
from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve
from recipe.partial_rollout.waits import finished
from tests.bench.scripted_engine import ScriptedWorker

# Ray's workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORKERS, BATCH, N = 2, 2, 2
CURVE = EngineCurve(step_s=0.0005, sample_s=0.0)


class Worker(ScriptedWorker):
    def open_round(self):
        for replica in self._scripted:
            replica.start()
        super().open_round()

    def load(self, version):
        self._version = version

    def take_calls(self):
        return []


class BrokenLoop(Worker):
    """Its agent loop is a user's, of the file that the row names, and has a bug."""

    async def _trained(self, sample, row):
        own = {}
        exec(compile("\ndef run(row):\n    return row['budget']\n", row["path"], "exec"), own)
        try:
            own["run"](row)
        except KeyError as error:
            raise RuntimeError("the loop failed") from error


class Control:
    """A ``ServerControl`` of the workers' own replicas."""

    restarted = 0
    addresses = ()
    servers = {}  # noqa: RUF012

    def __init__(self, guard_of):
        self._guard_of = guard_of

    def __len__(self):
        return WORKERS

    async def interrupt(self):
        await self._guard_of().ask("interrupt")

    async def resume(self):
        return None

    hold = restart_dead = new_preemptions = resume

    async def load(self):
        return {}


def rows(count, mean_length):
    lengths = np.random.default_rng(0).geometric(1 / mean_length, (count, N)).tolist()
    return [{"lengths": length, "index": i} for i, length in enumerate(lengths)]


def collate(batch):
    return {key: np.array([row[key] for row in batch] + [None], object)[:-1] for key in batch[0]}


class ScriptedTraining:
    """One process of a training in ``run_dir``; it resumes from what it finds there. A step's update takes no time.

    Its data is ``steps`` batches, of prompts of random length unless ``data`` has them.
    """

    def __init__(self, run_dir, placement, steps, *overrides, data=None, worker=Worker):
        self.run_dir, self.steps = run_dir, steps
        ours = (
            "trainer.default_local_dir=none",
            f"partial_rollout.placement={placement}",
            "partial_rollout.failures.worker_restarts=0",
        )
        with initialize_config_dir(str(main_ppo.CONF_DIR), version_base=None):
            composed = compose("quickstart_cpu", [*ours, *overrides])
        settings = replace(
            PartialRolloutConfig.from_config(composed),
            batch_groups=BATCH,
            samples_per_group=N,
            deadlines=Deadlines(stall_s=60, interrupt_s=30),
        )
        self.session = session = RunSession(settings, RunCheckpoints(run_dir))
        session.begin()
        loader = StatefulDataLoader(data or rows(steps * BATCH, 15), batch_size=BATCH, collate_fn=collate)
        session.offer(loader, TrainingSteps(steps, 1, steps))
        control = Control(lambda: self.guard)
        slots = ReplicaSlots(4, given=True, kv_tokens=None, prompt=4, response=64)
        session.open(control, slots, [], "scripted")
        store, manager = RayObjects(30.0), ray.remote(ManagerActor).options(num_cpus=0)
        self.manager = manager.remote(settings, store)
        placed = Placement(placement)
        self.workers = [ray.remote(worker).options(num_cpus=0).remote(CURVE, 1, placed) for _ in range(WORKERS)]
        self.guard = Guard(session, self.manager, self.workers, None)
        self.driver = Driver(session, self.manager, store, self.guard)
        session.driver = self.driver
        finished(self.guard.start())
        if session.checkpoints.chosen is not None:
            session.load()

    def begin(self):
        self.sync(self.session.checkpoints.resumed_step)

    def sync(self, version):
        async def load():
            async with self.driver.loading(version):
                await asyncio.wait_for(asyncio.gather(*[worker.load.remote(version) for worker in self.workers]), 60)

        finished(load())

    def step(self, step):
        groups = finished(self.driver.next_batch(step))
        assert len(groups) == BATCH
        self.session.complete_step(step)
        figures = dict(self.session.figures)
        self.session.figures.clear()
        self.sync(step)
        return figures

    def save(self):
        model = self.session.checkpoints.step_dir(self.session.completed_step) / "actor"
        self.session.save(lambda: (model.mkdir(), (model / "model.pt").touch()))

    def train(self, until):
        """The steps from the resumed one to ``until``, each with a checkpoint."""
        self.begin()
        for step in range(self.session.checkpoints.resumed_step + 1, until + 1):
            self.step(step)
            self.save()

    def end(self):
        """The training is over."""
        self.session.end()
        self.session.complete()
        self.kill()

    def kill(self):
        for actor in (self.manager, *self.workers):
            ray.kill(actor)
