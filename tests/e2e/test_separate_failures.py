"""Separate placement: what dies while the trainer updates, waits, or sends its weights heals or ends the run by name."""

import json
import signal

import pytest

from recipe.partial_rollout.tools.audit import audit
from tests.chaos.__main__ import main as chaos
from tests.chaos.victim import processes_of_session

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

# Samples outlast a step, so that some run whenever something dies.
SMALL = (
    "partial_rollout.placement=separate",
    "data.train_batch_size=4",
    "data.train_max_samples=24",
    "trainer.total_training_steps=null",
    "data.max_response_length=600",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "actor_rollout_ref.rollout.n=4",
    "partial_rollout.overlap=1.5",
    "partial_rollout.max_staleness=3",
)


def trains_step(run, step):
    """Whether the trainer has the batch of ``step`` and updates on it."""
    trace = run.directory / "trace.jsonl"
    events = [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []
    return any(event["event"] == "phase" and event["name"] == "wait" and event["step"] == step for event in events)


def ends_with(run, *words):
    code = run.process.wait(30)
    terminal = run.terminal()
    assert code == 1, terminal[-3000:]
    error = terminal[terminal.index("training failed:") :]
    assert all(word in error for word in words), error


def test_worker_that_dies_while_the_trainer_updates_is_replaced_and_its_samples_go_on(start, wait_for):
    run = start(*SMALL)
    wait_for(lambda: trains_step(run, 2), "the update of step 2")
    processes_of_session(run.process.pid, "ray::PartialRolloutAgentLoopWorker")[0].kill()
    assert run.process.wait(300) == 0, run.terminal()[-3000:]
    result, _ = audit(run.directory)
    assert result.violations == [] and result.complete and len(result.trained.all) == 24
    assert run.read().steps[6]["partial_rollout/failures/workers_restarted_total"] == 1


@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("VLLM::EngineCore", ("vLLM replica",)),
        ("ray::RecipeVLLMServer", ("vLLM replica",)),
        ("ray::WorkerDict", ("WorkerDict",)),
        ("ray::ManagerActor", ("ManagerActor",)),
    ],
    ids=["engine", "server", "trainer", "manager"],
)
def test_what_dies_while_the_trainer_updates_and_has_no_twin_ends_the_run_by_name(start, wait_for, victim, words):
    run = start(*SMALL)
    wait_for(lambda: trains_step(run, 2), "the update of step 2")
    processes_of_session(run.process.pid, victim)[0].kill()
    ends_with(run, *words)


def test_stopped_engine_ends_the_run_by_the_deadline_of_its_hold(start, wait_for):
    run = start(*SMALL, "partial_rollout.deadlines.interrupt_s=8")
    wait_for(lambda: trains_step(run, 2), "the update of step 2")
    processes_of_session(run.process.pid, "VLLM::EngineCore")[0].send_signal(signal.SIGSTOP)
    ends_with(run, "the vLLM replicas", "took more than 8 s", "deadlines.interrupt_s")


def test_training_that_is_killed_twice_while_it_decodes_and_trains_loses_nothing(task, count_start, tmp_path):
    arguments = ["--out", str(tmp_path), "--faults", "2", "--kinds", "kill", "--seed", "3"]
    arguments += ["--between-s", "2", "12", "--", "quickstart_cpu"]
    overrides = [f"quickstart.dir={task}", "partial_rollout.probe_s=0", "trainer.logger=[file]"]
    for _life in range(3):
        count_start()
    assert chaos([*arguments, *SMALL, *overrides]) == 0
    result, _ = audit(tmp_path / "run")
    assert result.violations == [] and result.complete and len(result.trained.all) == 24


def test_bound_of_zero_trains_the_batches_of_the_baseline(train):
    run = train(*SMALL, "partial_rollout.overlap=0", "partial_rollout.max_staleness=0")
    assert [sorted(group["group"] for group in event["trained"]) for event in run.rounds] == [
        list(range(4 * step, 4 * step + 4)) for step in range(6)
    ]
    assert all(step["partial_rollout/staleness/max"] == 0 for step in run.steps.values())
