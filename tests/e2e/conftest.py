"""Real training on two cores: verl, vLLM, Ray, FSDP2, in a process of its own for each run."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from tests.chaos.victim import kill_session

ROOT = Path(__file__).resolve().parents[2]
MAIN = ("-m", "recipe.partial_rollout.main_ppo")
ENGINE = {
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "scheduler_cls": "verl_ext.piecewise_scheduler.piecewise_scheduler",
}
"""vLLM arguments of an engine without Ray and verl around it, unless a test has its own"""
ON_DEVICE = {"distributed_executor_backend": "mp", "enforce_eager": False}
"""beside them, as vLLM runs on a GPU"""
SCHEDULERS = [
    pytest.param("synchronous", marks=pytest.mark.nightly),
    "asynchronous",
    pytest.param("device's", marks=pytest.mark.gpu),
]
"""vLLM's schedulers that tests run with: a CPU's own, as in trainings; a GPU's, on a CPU; the device's own"""
if os.environ.get("VERL_PLATFORM") != "cpu":
    # Triton's default is TF32, whose rounding is 50 times what the tests allow between reading and decoding.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
GREEDY_LOOP = (
    "task=calculator",
    "data.train_batch_size=4",
    "data.val_max_samples=8",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    # The loop decodes greedily.
    "partial_rollout.correction=none",
    # The weights stay what they are.
    "actor_rollout_ref.actor.optim.lr=0",
    "trainer.total_training_steps=null",
    "trainer.val_before_train=False",
    "trainer.test_freq=2",
    "trainer.rollout_data_dir=${trainer.default_local_dir}/said",
)
"""of an agent loop that decodes greedily under constant weights: both arms then make the same tokens"""
TRAININGS = (
    "test_training.py",
    "test_separate.py",
    "test_algorithms.py",
    "test_tutorial.py",
    "test_images.py",
    "test_experts.py",
    "test_lora.py",
)
"""files of every commit that train, the longest first: they begin, and what takes less fills both processes to the end"""
MOST_STARTS = 13
"""trainings of a session without the nightly tests; each keeps a core busy for most of 90 s before its first step"""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: TRAININGS.index(item.path.name) if item.path.name in TRAININGS else len(TRAININGS))


@pytest.fixture(scope="session")
def shared(tmp_path_factory, worker_id):
    """A folder that workers of pytest-xdist share."""
    own = tmp_path_factory.getbasetemp()
    directory = (own if worker_id == "master" else own.parent) / "shared"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def count_start(shared, pytestconfig):
    """Counts a training that is about to start; fails the test whose training is one too many for every commit."""
    path = shared / "training_starts"

    def count():
        with FileLock(f"{path}.lock", timeout=60):
            starts = 1 + (int(path.read_text()) if path.exists() else 0)
            path.write_text(f"{starts}\n")
        assert starts <= MOST_STARTS or "not nightly" not in pytestconfig.option.markexpr, (
            f"{MOST_STARTS} trainings have started: merge this one with another, or mark its test nightly"
        )

    return count


@pytest.fixture(scope="session")
def task(shared):
    """The embedded task after a minimal warm start: enough to load, sample and train."""
    command = [
        sys.executable,
        "-m",
        "recipe.partial_rollout.tasks.ready_start",
        "--out",
        str(shared / "task"),
        "--tiny",
    ]
    with FileLock(shared / "task.lock", timeout=320):
        subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    return shared


@pytest.fixture(scope="module", params=SCHEDULERS)
def on_engine(task, request):
    """``on_engine(body, **engine_args)``: the result of ``body(engine)`` on a vLLM engine without Ray or verl around it.

    Once with each of ``SCHEDULERS``.
    """

    def call(body, **options):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from recipe.partial_rollout.engine.replica import chosen_by

        async def run():
            with scheduling(request.param) as (own, check):
                engine = AsyncLLM.from_engine_args(
                    AsyncEngineArgs(model=str(task / "task" / "model"), dtype="float32", **{**ENGINE, **own, **options})
                )
            print(f"engine: {chosen_by(engine.vllm_config)}")
            try:
                result = await body(engine)
                await check(engine)
                return result
            finally:
                engine.shutdown()

        return asyncio.run(run())

    return call


@contextlib.contextmanager
def scheduling(scheduler):
    """Arguments of an engine with that scheduler; and a function that fails if the engine has not run with it."""

    async def is_chosen(engine):
        assert scheduler != "synchronous" or not engine.vllm_config.scheduler_config.async_scheduling

    if scheduler != "asynchronous":
        on_gpu = scheduler == "device's" and os.environ.get("VERL_PLATFORM") != "cpu"
        # The environment may leave out what an acceptance suspects (tests/gpu).
        left_out = json.loads(os.environ.get("PARTIAL_ROLLOUT_TEST_ENGINE", "{}"))
        yield {**ON_DEVICE, **left_out} if on_gpu else {}, is_chosen
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import async_scheduling

        with async_scheduling.allowed() as own:
            yield own, async_scheduling.watched


def begun(terminal):
    """Whether verl's ``fit`` shows its progress bar in the file of what libraries print, which ``terminal`` names."""
    named = re.search(r"libraries print to (\S+)", terminal.read_text())
    return named is not None and "Training Progress" in Path(named[1]).read_text()


@contextlib.contextmanager
def launcher(task, count_start, directory_of):
    """A function that starts ``main_ppo`` on the task with overrides; all that it has started ends with it."""
    runs = []

    def build(*overrides, name="run", program=MAIN):
        count_start()
        directory = directory_of(name)
        directory.mkdir()
        log = directory / "terminal.log"
        ours = [f"quickstart.dir={task}", f"trainer.default_local_dir={directory}", "trainer.logger=[file]"]
        # Hydra takes one override of a key: the last.
        unique = {override.split("=")[0]: override for override in [*ours, *overrides]}.values()
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *program, "--config-name", "quickstart_cpu", *unique],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )
        run = SimpleNamespace(
            process=process,
            directory=directory,
            terminal=log.read_text,
            read=lambda: read(directory),
            trains=lambda: begun(log),
        )
        runs.append(run)
        return run

    yield build
    for run in runs:
        kill_session(run.process)


def finish(run, timeout_s=540):
    """Wait for a training to reach its end; what its directory holds."""
    assert run.process.wait(timeout_s) == 0, run.terminal()[-3000:]
    return read(run.directory)


@pytest.fixture
def start(task, count_start, tmp_path):
    with launcher(task, count_start, lambda name: tmp_path / name) as build:
        yield build


@pytest.fixture
def train(start):
    return lambda *overrides, name="run": finish(start(*overrides, name=name))


@pytest.fixture(scope="module")
def module_start(task, count_start, tmp_path_factory):
    """As ``start``, for trainings that several tests look at."""
    with launcher(task, count_start, lambda name: tmp_path_factory.mktemp("runs") / name) as build:
        yield build


@pytest.fixture(scope="module")
def module_train(module_start):
    return lambda *overrides, name="run", program=MAIN: finish(module_start(*overrides, name=name, program=program))


def read(directory):
    """What a run directory holds; a run that was resumed has a file of metrics for each of its processes."""
    files = sorted(directory.glob("metrics*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    log = [json.loads(line) for line in (directory / "run.jsonl").read_text().splitlines()]
    runs, ends = ([event for event in log if event["event"] == kind] for kind in ("run", "ended"))
    return SimpleNamespace(
        steps={line["step"]: line["data"] for line in lines if "training/global_step" in line["data"]},
        rounds=[event for event in log if event["event"] == "round"],
        log=log,
        run=runs[-1] | {"complete": bool(ends) and log[-1] is ends[-1] and ends[-1]["complete"]},
        directory=directory,
    )


@pytest.fixture(scope="session")
def read_run():
    return read


@pytest.fixture(scope="session")
def error_of():
    """Waits for the end of a run that fails: exit code 1 in time; its error."""

    def error(run, within_s=30.0):
        code = run.process.wait(within_s)
        terminal = run.terminal()
        assert code == 1, terminal[-3000:]
        return terminal[terminal.index("training failed:") :]

    return error


@pytest.fixture(scope="session")
def wait_for():
    """Waits until a condition holds; fails with what was awaited."""

    def wait(condition, what, timeout_s=300):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
            time.sleep(0.2)

    return wait
