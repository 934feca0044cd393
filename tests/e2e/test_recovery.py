"""A training that is robbed of its worker, stopped and killed trains every prompt of its epoch once."""

import signal
import subprocess
import time

import pytest

from recipe.partial_rollout.tools.audit import audit
from tests.chaos.victim import processes_of_session

# Two or three trainings, one after the other.
pytestmark = pytest.mark.timeout(1800)

SMALL = (
    "data.train_batch_size=4",
    "data.train_max_samples=24",
    "trainer.total_training_steps=null",
    "data.max_response_length=400",
    "actor_rollout_ref.rollout.n=4",
    "partial_rollout.overlap=1.0",
    "partial_rollout.max_staleness=2",
)
SEPARATE = "partial_rollout.placement=separate"


def sealed(run_dir, step):
    return (run_dir / f"global_step_{step}" / "partial_rollout" / "manifest.json").exists()


@pytest.mark.parametrize(
    "killed", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["stopped", "and killed"]
)
def test_training_that_is_robbed_of_its_worker_stopped_and_killed_loses_nothing(start, wait_for, tmp_path, killed):
    """The first process loses its worker and is stopped; in the second the engine decodes while it trains, and it may be
    killed with all that it started, for a third to go on: each placement goes on from the other's checkpoint."""
    run_dir = tmp_path / "kept"
    ours = (*SMALL, "data.train_max_samples=32", f"trainer.default_local_dir={run_dir}", "trainer.resume_mode=auto")
    # The manifest is sealed before the weight sync and the validation of its step: the signal comes in that step.
    first = start(*ours, "trainer.save_freq=2", "trainer.test_freq=1", "data.val_max_samples=4", name="first")
    wait_for(lambda: "Training Progress" in first.terminal(), "training")
    time.sleep(3)
    (worker,) = processes_of_session(first.process.pid, "ray::PartialRolloutAgentLoopWorker")
    worker.kill()
    wait_for(lambda: sealed(run_dir, 2), "a checkpoint")
    assert "agent_loop_worker_0.2 takes its" in first.terminal()
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(60) == 128 + signal.SIGTERM, first.terminal()[-3000:]
    assert "training stopped by SIGTERM" in first.terminal()
    assert audit(run_dir)[0].violations == []
    wait_for(lambda: processes_of_session(first.process.pid) == [], "the end of what the run had started", 30)

    last = start(*ours, SEPARATE, "trainer.save_freq=1", name="second")
    if killed:
        wait_for(lambda: sealed(run_dir, 3) or last.process.poll() is not None, "a checkpoint of the resumed training")
        time.sleep(1)
        assert last.process.poll() is None, last.terminal()[-3000:]
        subprocess.run(["pkill", "-9", "-s", str(last.process.pid)], check=False)
        last.process.wait(10)
        wait_for(lambda: processes_of_session(last.process.pid) == [], "the end of what was killed", 30)
        last = start(*ours, "trainer.save_freq=2", name="third")
    assert last.process.wait(300) == 0, last.terminal()[-3000:]
    result, _ = audit(run_dir)
    assert result.violations == [] and result.complete and result.kills == killed
    assert len(result.trained.all) == 32
