"""A training that is stopped, killed and robbed of its worker trains every prompt of its epoch once."""

import signal
import subprocess
import time

import pytest

from recipe.partial_rollout.tools.audit import audit
from tests.chaos.__main__ import main as chaos
from tests.chaos.victim import processes_of_session

# Three trainings, one after the other.
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


@pytest.mark.nightly
def test_killed_training_goes_on_from_its_checkpoint_and_loses_nothing(task, count_start, tmp_path):
    arguments = ["--out", str(tmp_path), "--faults", "1", "--kinds", "kill", "--seed", "1"]
    arguments += ["--between-s", "6", "12", "--", "quickstart_cpu"]
    overrides = [f"quickstart.dir={task}", "partial_rollout.probe_s=0", "trainer.logger=[file]"]
    for _life in range(2):
        count_start()
    assert chaos([*arguments, *SMALL, *overrides]) == 0
    result, _ = audit(tmp_path / "run")
    assert result.violations == [] and result.complete and result.kills == 1
    assert len(result.trained.all) == 24


def sealed(run_dir, step):
    return (run_dir / f"global_step_{step}" / "partial_rollout" / "manifest.json").exists()


def test_training_that_is_stopped_killed_and_robbed_of_its_worker_loses_nothing(start, wait_for, tmp_path):
    """The first process is stopped; the second is killed with all that it started; the third loses its worker and ends. In
    the second the engine decodes while it trains, so each placement goes on from the other's checkpoint."""
    run_dir = tmp_path / "kept"
    ours = (*SMALL, "data.train_max_samples=32", f"trainer.default_local_dir={run_dir}", "trainer.resume_mode=auto")
    # The manifest is sealed before the weight sync and the validation of its step: the signal comes in that step.
    first = start(*ours, "trainer.save_freq=2", "trainer.test_freq=1", "data.val_max_samples=4", name="first")
    wait_for(lambda: sealed(run_dir, 2), "a checkpoint")
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(60) == 128 + signal.SIGTERM, first.terminal()[-3000:]
    assert "training stopped by SIGTERM" in first.terminal()
    assert audit(run_dir)[0].violations == []
    time.sleep(2)
    assert processes_of_session(first.process.pid) == [], "nothing of the run is left"

    second = start(*ours, SEPARATE, "trainer.save_freq=1", name="second")
    wait_for(lambda: sealed(run_dir, 3) or second.process.poll() is not None, "a checkpoint of the resumed training")
    time.sleep(1)
    assert second.process.poll() is None, second.terminal()[-3000:]
    subprocess.run(["pkill", "-9", "-s", str(second.process.pid)], check=False)
    second.process.wait(10)
    wait_for(lambda: processes_of_session(second.process.pid) == [], "the end of what was killed", 30)

    third = start(*ours, "trainer.save_freq=2", name="third")
    wait_for(lambda: "Training Progress" in third.terminal(), "the training that goes on after the kill")
    time.sleep(3)
    (worker,) = processes_of_session(third.process.pid, "ray::PartialRolloutAgentLoopWorker")
    worker.kill()
    assert third.process.wait(300) == 0, third.terminal()[-3000:]
    result, _ = audit(run_dir)
    assert result.violations == [] and result.complete and result.kills == 1
    assert len(result.trained.all) == 32
