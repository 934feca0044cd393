"""Two thousand rounds over scripted engines: the memory of driver, manager and workers does not grow with them."""

import gc
import itertools
import os
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
from verl.utils.ray_utils import auto_await

from recipe.partial_rollout.config.choices import Mode, Placement
from recipe.partial_rollout.config.sections import Deadlines, Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.output_store import RayObjects
from recipe.partial_rollout.manager.types import Prompt
from recipe.partial_rollout.planner.engine_curve import EngineCurve
from recipe.partial_rollout.records.ledger import Ledger
from recipe.partial_rollout.records.trace import Arm, RunSettings, RunTrace
from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.rollout.engine_probe import EndedCalls
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.step_book import StepBook
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.rollout.workers import WorkerPool
from recipe.partial_rollout.worker.replica_choice import ReplicaChoice
from tests.bench.scripted_engine import ScriptedWorker

# Ray's workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROUNDS = int(os.environ.get("PARTIAL_ROLLOUT_SOAK_ROUNDS", 2000))
WARM_UP = ROUNDS // 10
WORKERS, BATCH, N = 4, 2, 2
MOST_BLOCKS = 5
"""blocks of Python's memory that a round may leave behind in a process"""
MOST_KIB = 8
"""memory that a round may leave behind in a process, Ray's own included: an idle actor keeps 20 bytes a call"""


class SoakWorker(ScriptedWorker):
    def open_round(self):
        for replica in self._scripted:
            replica.start()
        super().open_round()

    def take_calls(self):
        return []


class Control:
    """A ``ServerControl`` of the workers' own replicas."""

    restarted = 0

    def __init__(self, pool_of):
        self._pool_of = pool_of

    async def interrupt(self):
        await self._pool_of().ask("interrupt")

    async def resume(self):
        pass

    hold = restart_dead = resume

    async def running_tokens(self):
        return {}

    async def load(self):
        return {}


async def nothing(*_):
    return {}


def memory_here(_=None):
    gc.collect()
    return psutil.Process().memory_info().rss / 1024, sys.getallocatedblocks()


class Soak:
    """A driver's rollout in ``placement``, without engines and without a trainer."""

    def __init__(self, directory, placement):
        settings = SimpleNamespace(
            deadlines=Deadlines(stall_s=60, interrupt_s=30),
            batch_groups=BATCH,
            group_filter=None,
            separate=placement is Placement.SEPARATE,
            failures=SimpleNamespace(max_masked_fraction=0.0),
            dashboard=SimpleNamespace(progress_s=0),
        )
        lengths = np.random.default_rng(0)
        rows = ({"lengths": lengths.geometric(1 / 15, N).tolist(), "index": i} for i in itertools.count())
        prompts = (Prompt(f"0/{i}", 0, row) for i, row in enumerate(rows))
        facts = RunSettings(Arm.PR, "soak", BATCH, N, WORKERS, 4, 4, "window", "bounded", "", "")
        context = SimpleNamespace(
            settings=settings,
            control=Control(lambda: self.pool),
            trace=RunTrace(directory, [], facts),
            source=SimpleNamespace(left=1 << 30, take=lambda count: list(itertools.islice(prompts, count))),
            ledger=Ledger(directory),
            stop=StopSignals(),
            trainers=[],
            last_step=1 << 30,
            full_concurrency=16,
            engine_metrics=nothing,
        )
        store = RayObjects(30.0)
        admission = Admission(Mode.WINDOW, BATCH, N, 1.0, 2 * BATCH, 2 * BATCH * N, max_staleness=4)
        self.manager = ray.remote(ManagerActor).options(num_cpus=0).remote(admission, Scheduling(), 60.0, store=store)
        curve = EngineCurve(step_s=0.0005, sample_s=0.0)
        self.workers = [ray.remote(SoakWorker).options(num_cpus=0).remote(curve, 1, placement) for _ in range(WORKERS)]

        async def connect(i, name, worker):
            await worker.connect.remote(name, self.manager, 4, ReplicaChoice({}))

        self.pool = WorkerPool(self.workers, None, connect, 0, settings.deadlines, context.stop)
        guard = Guard(context, self.manager, self.pool)
        others = SimpleNamespace(announce_restarted=nothing, reckon=nothing)
        book = StepBook(context, SimpleNamespace(full_tokens_per_s=None), None)
        calls = EndedCalls(guard.ask)
        self.driver = Driver(context, self.manager, store, self.pool, others, others, calls, book, None, guard)
        auto_await(self.pool.start)()

    def begin(self):
        self.driver.begin()
        self.sync(0)

    def sync(self, version):
        auto_await(self.driver.before_load)(version)
        auto_await(self.driver.after_load)(version)

    def step(self, step):
        groups = auto_await(self.driver.next_batch)(step)
        assert len(groups) == BATCH
        auto_await(self.driver.finish_step)()
        self.driver.take_step_metrics()
        self.sync(step)

    def memory(self):
        """Of the driver, the manager and each worker: KiB of the process, and Python's blocks."""
        actors = [self.manager, *self.workers]
        return [memory_here(), *ray.get([actor.__ray_call__.remote(memory_here) for actor in actors], timeout=60)]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("placement", list(Placement))
def test_memory_is_flat_over_two_thousand_rounds(placement, tmp_path, capsys):
    soak, seen = Soak(tmp_path, placement), []
    soak.begin()
    for step in range(1, ROUNDS + 1):
        soak.step(step)
        if step >= WARM_UP and step % 20 == 0:
            seen.append(soak.memory())
    rounds = np.arange(len(seen)) * 20
    # [process, KiB or blocks]: least squares over the rounds after the first tenth.
    slopes = np.polyfit(rounds, np.array(seen).reshape(len(seen), -1), 1)[0].reshape(-1, 2)
    kib, blocks = np.round(slopes.T, 2).tolist()
    with capsys.disabled():
        print(f"\n{placement}, {ROUNDS} rounds; driver, manager, workers: {kib} KiB and {blocks} blocks a round")
    assert max(kib) < MOST_KIB and max(blocks) < MOST_BLOCKS
