"""What dies is replaced and nothing is lost, or the run ends within 30 seconds with an error that names it.

In colocated placement and in separate placement with one engine and with two.
"""

import json
import signal
import time
from pathlib import Path

import pytest

from recipe.partial_rollout.tools.audit import audit
from tests.chaos.__main__ import main as chaos
from tests.chaos.victim import processes_of_session

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
ENGINE, WORKER = "VLLM::EngineCore", "ray::PartialRolloutAgentLoopWorker"
APART = "partial_rollout.placement=separate"
SMALL = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4")
# Responses never end by themselves, so a round lasts long enough to be in the middle of it.
LONG = (*SMALL, "actor_rollout_ref.rollout.ignore_eos=True", "trainer.total_training_steps=3")
SHORT = (*SMALL, "data.max_response_length=32", "trainer.total_training_steps=3")
# Samples outlast a step, so that some run whenever something dies.
SEPARATE = (
    *SMALL,
    APART,
    "data.train_max_samples=24",
    "trainer.total_training_steps=null",
    "data.max_response_length=600",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "partial_rollout.overlap=1.5",
    "partial_rollout.max_staleness=3",
)


def in_mid_round(run):
    """Whether its first round goes on for two seconds."""
    if not run.trains() or not processes_of_session(run.process.pid, ENGINE):
        return False
    time.sleep(2)
    return True


def updates(run):
    """Whether the trainer has the batch of step 2 and updates on it."""
    log = run.directory / "run.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return any(event["event"] == "phase" and event["name"] == "wait" and event["step"] == 2 for event in events)


def has_stepped(run):
    metrics = run.directory / "metrics.jsonl"
    return metrics.exists() and '"training/global_step"' in metrics.read_text()


@pytest.mark.parametrize(
    ("overrides", "when", "victim", "words"),
    [
        (LONG, in_mid_round, ENGINE, ("vLLM replica", "failed on request")),
        ((*LONG, "partial_rollout.enable=False"), in_mid_round, ENGINE, ("vLLM replica", "failed on request")),
        (
            (*LONG, "partial_rollout.failures.worker_restarts=0"),
            in_mid_round,
            WORKER,
            ("agent_loop_worker_0 died during the round", "worker_restarts=0"),
        ),
        (SEPARATE, updates, "ray::WorkerDict", ("WorkerDict",)),
        (SEPARATE, updates, "ray::ManagerActor", ("ManagerActor",)),
        (
            (*SMALL, APART, "data.max_response_length=64", "trainer.total_training_steps=50"),
            has_stepped,
            "ray::CheckpointEngineWorker",
            ("failed in vLLM replica",),
        ),
    ],
    ids=["engine", "noPR engine", "worker", "trainer", "manager", "receiver of weights"],
)
def test_what_dies_without_a_twin_ends_the_run_by_name(start, wait_for, error_of, overrides, when, victim, words):
    run = start(*overrides)
    wait_for(lambda: when(run), when.__name__)
    processes_of_session(run.process.pid, victim)[0].kill()
    error = error_of(run)
    assert all(word in error for word in words), error


def test_stopped_engine_ends_the_run_by_the_deadline_of_its_hold(start, wait_for, error_of):
    run = start(*SEPARATE, "partial_rollout.deadlines.interrupt_s=8")
    wait_for(lambda: updates(run), "the update of step 2")
    processes_of_session(run.process.pid, ENGINE)[0].send_signal(signal.SIGSTOP)
    error = error_of(run)
    assert "vLLM replica" in error and "took more than 8 s" in error and "deadlines.interrupt_s" in error, error


@pytest.mark.parametrize(
    ("overrides", "what"),
    [(SHORT, "weight sync"), ((*SHORT, APART), "loading")],
    ids=["colocated", "separate"],
)
def test_failed_weight_sync_ends_the_run_by_name(start, wait_for, error_of, monkeypatch, overrides, what):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    extension = "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=bad_sync.FailingExtension"
    run = start(*overrides, extension)
    wait_for(run.trains, "training")
    error = error_of(run, within_s=90.0)
    assert f"{what} of version 1 failed in vLLM replica" in error and "no_such_weight" in error, error


def test_reward_that_raises_is_asked_again_and_one_that_hangs_ends_the_run(start, wait_for, error_of):
    """The first step trains a sample whose first score raised; in the second no score comes, at either try."""
    run = start(
        *SHORT,
        f"reward.custom_reward_function.path={HERE / 'bad_reward.py'}",
        "partial_rollout.deadlines.reward_s=5",
        # All hang at once.
        "partial_rollout.reward_concurrency=16",
        "partial_rollout.failures.sample_retries=1",
        "partial_rollout.reward_in_worker=False",
        # No sample of the second step is scored in the first.
        "partial_rollout.overlap=0",
    )
    wait_for(lambda: run.trains() or run.process.poll() is not None, "training")
    error = error_of(run, within_s=60.0)
    assert "16 of the 16 samples" in error and "reward function gave no score" in error and "reward_s" in error, error
    (step,) = run.read().steps.values()
    assert step["partial_rollout/failures/retried_total"] == 1
    assert step["partial_rollout/failures/masked_total"] == step["partial_rollout/lost_samples"] == 0


# The engines sleep between rounds: on a CPU that frees no memory, but takes the same calls. They validate between the next
# round and the weight sync before it, which restarts them.
TWO_ENGINES = (
    *SMALL,
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.free_cache_engine=True",
    "trainer.test_freq=1",
    "data.val_max_samples=4",
)


@pytest.mark.parametrize(
    ("overrides", "steps", "when"),
    [
        (TWO_ENGINES, 4, in_mid_round),
        ((*SMALL, APART, "actor_rollout_ref.rollout.n_gpus_per_node=2"), 8, has_stepped),
    ],
    ids=["colocated", "separate"],
)
def test_killed_replicas_come_back_and_the_other_takes_their_samples_over(start, wait_for, overrides, steps, when):
    """The engine of one is killed, and then the server of the other: both work again, and nothing is lost."""
    run = start(
        *overrides,
        f"data.train_max_samples={4 * steps}",
        "trainer.total_training_steps=null",
        "data.max_response_length=400",
        "partial_rollout.failures.replica_restarts=2",
        "partial_rollout.resume_kv=recompute",
    )
    wait_for(lambda: when(run), when.__name__)
    killed, orphan = processes_of_session(run.process.pid, ENGINE)
    server = orphan.parent()
    assert "RecipeVLLMServer" in " ".join(server.cmdline())
    killed.kill()
    later = steps // 2 - 1
    wait_for(lambda: has_stepped(run) and later in run.read().steps, f"step {later}")
    server.kill()
    assert run.process.wait(300) == 0, run.terminal()[-3000:]
    result, _ = audit(run.directory)
    assert result.violations == result.notes() == [] and result.complete and len(result.trained) == 4 * steps
    read = run.read()
    restarted = {s: metrics["partial_rollout/failures/replicas_restarted_total"] for s, metrics in read.steps.items()}
    assert restarted[steps] == 2
    assert not orphan.is_running(), "it would hold the memory of its device"
    whole = min(step for step, count in restarted.items() if count == 2)
    calls = [call for event in read.rounds if event["step"] > whole for call in event["phase"]["calls"]]
    tokens = [sum(call[3] for call in calls if call[0] == replica) for replica in (0, 1)]
    assert when is in_mid_round or min(tokens) > 0.25 * sum(tokens) > 0, "each successor decodes its share"


def test_training_that_is_killed_twice_loses_nothing(task, count_start, tmp_path):
    arguments = ["--out", str(tmp_path), "--faults", "2", "--kinds", "kill", "--seed", "3"]
    arguments += ["--between-s", "2", "12", "--", "quickstart_cpu"]
    overrides = [f"quickstart.dir={task}", "trainer.logger=[file]"]
    for _life in range(3):
        count_start()
    assert chaos([*arguments, *SEPARATE, *overrides]) == 0
    result, _ = audit(tmp_path / "run")
    assert result.violations == result.notes() == [] and result.complete and len(result.trained) == 24
