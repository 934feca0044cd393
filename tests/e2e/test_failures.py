"""What dies is named, within 30 seconds of its death, and the run ends."""

import time
from pathlib import Path

import pytest

from recipe.partial_rollout.tools.audit import audit
from tests.chaos.victim import processes_of_session

pytestmark = pytest.mark.nightly

HERE = Path(__file__).parent

# Responses never end by themselves, so a round lasts long enough to be in the middle of it.
LONG = (
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "trainer.total_training_steps=3",
)
SHORT = (
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "data.max_response_length=32",
    "trainer.total_training_steps=3",
)


def in_mid_round(run):
    return "Training Progress" in run.terminal() and processes_of_session(run.process.pid, "VLLM::EngineCore")


def check_ends_with(run, *words, within_s=30.0):
    """The run ends in time, with exit code 1 and an error of these words."""
    start = time.monotonic()
    code = run.process.wait(within_s)
    terminal = run.terminal()
    assert code == 1, terminal[-3000:]
    error = terminal[terminal.index("training failed:") :]
    for word in words:
        assert word in error, error
    return time.monotonic() - start


@pytest.mark.parametrize("enable", [True, False], ids=["PR", "noPR"])
def test_killed_engine_ends_the_run_by_name(start, wait_for, enable):
    run = start(*LONG, f"partial_rollout.enable={enable}")
    wait_for(lambda: in_mid_round(run), "a round of training")
    time.sleep(3)
    processes_of_session(run.process.pid, "VLLM::EngineCore")[0].kill()
    check_ends_with(run, "vLLM replica", "failed on request")


def test_killed_worker_that_may_not_be_restarted_ends_the_run_by_name(start, wait_for):
    run = start(*LONG, "partial_rollout.failures.worker_restarts=0")
    wait_for(lambda: in_mid_round(run), "a round of training")
    time.sleep(3)
    processes_of_session(run.process.pid, "ray::PartialRolloutAgentLoopWorker")[0].kill()
    check_ends_with(run, "agent_loop_worker_0 died during the round", "worker_restarts=0")


def test_killed_replicas_come_back_and_the_other_takes_their_samples_over(start, wait_for):
    """Two replicas: the engine of one is killed in mid-round, and then the server of the other. Nothing is lost, and both
    work again after the next weight sync."""
    run = start(
        "data.train_batch_size=4",
        "data.train_max_samples=16",
        "trainer.total_training_steps=null",
        "data.max_response_length=400",
        "actor_rollout_ref.rollout.n=4",
        "trainer.n_gpus_per_node=2",
        "partial_rollout.failures.replica_restarts=2",
        # The engines sleep between rounds: on a CPU that frees no memory, but takes the same calls.
        "actor_rollout_ref.rollout.free_cache_engine=True",
        "partial_rollout.resume_kv=recompute",
        # Between the weight sync, which restarts them, and the next round.
        "trainer.test_freq=1",
        "data.val_max_samples=4",
    )
    wait_for(lambda: in_mid_round(run), "a round of training")
    time.sleep(2)
    killed, orphan = processes_of_session(run.process.pid, "VLLM::EngineCore")
    server = orphan.parent()
    assert "RecipeVLLMServer" in " ".join(server.cmdline())
    killed.kill()
    metrics = run.directory / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"training/global_step"' in metrics.read_text(), "the first step")
    server.kill()
    assert run.process.wait(300) == 0, run.terminal()[-3000:]
    result, _ = audit(run.directory)
    assert result.violations == [] and result.complete and len(result.trained.all) == 16
    assert run.read().steps[4]["partial_rollout/failures/replicas_restarted_total"] == 2
    assert not orphan.is_running(), "it would hold the memory of its device"


def test_reward_function_that_raises_is_asked_again_and_one_that_hangs_ends_the_run_by_name(start, wait_for):
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
    wait_for(lambda: "Training Progress" in run.terminal() or run.process.poll() is not None, "training")
    check_ends_with(run, "16 of the 16 samples", "reward function gave no score", "reward_s", within_s=60.0)
    (step,) = run.read().steps.values()
    assert step["partial_rollout/failures/retried_total"] == 1
    assert step["partial_rollout/failures/masked_total"] == step["partial_rollout/lost_samples"] == 0


def test_failed_weight_sync_ends_the_run_by_name(start, wait_for, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    run = start(*SHORT, "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=bad_sync.FailingExtension")
    wait_for(lambda: "Training Progress" in run.terminal(), "training")
    check_ends_with(run, "weight sync of version 1 failed in vLLM replica", "no_such_weight", within_s=60.0)
