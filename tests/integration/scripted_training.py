"""A training without verl and without engines: real files, driver, manager and workers over scripted replicas."""

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
from recipe.partial_rollout.records.run_log import Checkpoint, Ended
from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.prompt_source import PromptSource, TrainingSteps
from recipe.partial_rollout.rollout.recorder import Recorder, run_settings
from recipe.partial_rollout.rollout.replicas import ReplicaSlots
from recipe.partial_rollout.rollout.run_files import RunFiles
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve
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


class Control:
    """A ``ServerControl`` of the workers' own replicas."""

    restarted = 0
    addresses = ()
    servers = {}  # noqa: RUF012

    def __init__(self, guard_of):
        self._guard_of = guard_of

    async def interrupt(self):
        await self._guard_of().ask("interrupt")

    async def resume(self):
        pass

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

    Its data is ``steps`` batches, of prompts of random length.
    """

    def __init__(self, run_dir, placement, steps, *overrides):
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
        self.files = RunFiles(RunCheckpoints(run_dir))
        self.files.begin()
        loader = StatefulDataLoader(rows(steps * BATCH, 15), batch_size=BATCH, collate_fn=collate)
        training = TrainingSteps(steps, 1, steps)
        source = PromptSource(loader, total=training.offered(settings) * BATCH)
        control = Control(lambda: self.guard)
        slots = ReplicaSlots(4, given=True, kv_tokens=None, prompt=4, response=64, replicas=WORKERS)
        facts = run_settings(
            settings, training, slots, replicas=WORKERS, resumed=self.resumed_step, experiment="scripted", trainer=""
        )
        self.recorder = Recorder(settings, self.files.open_log(facts, ()), control, slots)
        store, manager = RayObjects(30.0), ray.remote(ManagerActor).options(num_cpus=0)
        self.manager = manager.remote(settings, store)
        placed = Placement(placement)
        self.workers = [ray.remote(Worker).options(num_cpus=0).remote(CURVE, 1, placed) for _ in range(WORKERS)]
        self.guard = Guard(self.recorder, self.manager, self.workers, None, [], StopSignals.of_process())
        self.driver = Driver(self.recorder, training, source, self.manager, store, self.guard)
        asyncio.run(self.guard.start())
        if self.files.checkpoints.chosen is not None:
            asyncio.run(self.driver.load(self.files.checkpoints))

    @property
    def resumed_step(self):
        return self.files.checkpoints.resumed_step

    def begin(self):
        self.sync(self.resumed_step)

    def sync(self, version):
        async def load():
            async with self.driver.loading(version):
                await asyncio.wait_for(asyncio.gather(*[worker.load.remote(version) for worker in self.workers]), 60)

        asyncio.run(load())

    def step(self, step):
        groups = asyncio.run(self.driver.next_batch(step))
        assert len(groups) == BATCH
        asyncio.run(self.driver.finish_step())
        self.files.completed_step = step
        self.recorder.metrics.clear()
        self.sync(step)

    def save(self):
        checkpoints, step = self.files.checkpoints, self.files.completed_step
        model = checkpoints.step_dir(step) / "actor"
        checkpoints.save(step, self.driver.in_flight(), lambda: (model.mkdir(), (model / "model.pt").touch()))
        self.recorder.log.add(Checkpoint(step), sync=True)

    def train(self, until):
        """The steps from the resumed one to ``until``, each with a checkpoint."""
        self.begin()
        for step in range(self.resumed_step + 1, until + 1):
            self.step(step)
            self.save()

    def end(self):
        """The training is over."""
        step = self.files.completed_step
        self.recorder.log.add(Ended(step, complete=True), sync=True)
        self.kill()

    def kill(self):
        for actor in (self.manager, *self.workers):
            ray.kill(actor)
