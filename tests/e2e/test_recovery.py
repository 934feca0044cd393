"""A training that is stopped, killed and robbed of its worker trains every prompt of its epoch once."""

import signal
import time

import pytest

from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.tools.chaos.command import main as chaos
from recipe.partial_rollout.tools.chaos.victim import processes_of_session

# Up to three trainings, one after the other.
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


def test_killed_training_goes_on_from_its_checkpoint_and_loses_nothing(task, tmp_path):
    arguments = ["--out", str(tmp_path), "--kills", "1", "--seed", "1", "--between-s", "6", "12", "quickstart_cpu"]
    overrides = [f"quickstart.dir={task}", "partial_rollout.probe_s=0", "trainer.logger=[file]"]
    assert chaos([*arguments, *SMALL, *overrides]) == 0
    result, _ = audit(tmp_path / "run")
    assert result.violations == [] and result.complete and result.kills == 1
    assert len(result.trained) == 24


def test_stopped_training_goes_on_and_survives_the_death_of_its_worker(start, wait_for, task, tmp_path):
    """The second process ends before its data does, and without draining; the third has more steps and goes on with it."""
    run_dir = tmp_path / "kept"
    ours = (*SMALL, f"trainer.default_local_dir={run_dir}", "trainer.save_freq=2", "trainer.resume_mode=auto")
    # The manifest is sealed before the weight sync and the validation of its step: the signal comes in that step.
    first = start(*ours, "trainer.test_freq=1", "data.val_max_samples=4", name="first")
    wait_for(lambda: (run_dir / "global_step_2" / "partial_rollout" / "manifest.json").exists(), "a checkpoint")
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(60) == 128 + signal.SIGTERM, first.terminal()[-3000:]
    assert "training stopped by SIGTERM" in first.terminal()
    assert audit(run_dir)[0].violations == []
    time.sleep(2)
    assert processes_of_session(first.process.pid) == [], "nothing of the run is left"

    short = ("trainer.total_training_steps=5", "partial_rollout.drain=False", "trainer.save_freq=1")
    second = start(*ours, *short, name="second")
    wait_for(lambda: "Training Progress" in second.terminal(), "the resumed training")
    time.sleep(3)
    (worker,) = [
        p
        for p in processes_of_session(second.process.pid)
        if "ray::PartialRolloutAgentLoopWorker" in " ".join(p.cmdline())
    ]
    worker.kill()
    assert second.process.wait(300) == 0, second.terminal()[-3000:]
    result, _ = audit(run_dir)
    assert result.violations == [] and result.complete and len(result.trained) == 20
    assert len(result.admitted) > 20, "prompts are in flight"

    third = start(*ours, name="third")
    assert third.process.wait(300) == 0, third.terminal()[-3000:]
    result, _ = audit(run_dir)
    assert result.violations == [] and result.complete and len(result.trained) == 24
