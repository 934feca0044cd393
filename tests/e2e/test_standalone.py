"""Separate placement with engines on devices of their own: what dies there is replaced, or named."""

import time
from pathlib import Path

import pytest

from recipe.partial_rollout.tools.audit import audit
from tests.chaos.victim import processes_of_session

HERE = Path(__file__).parent
SEPARATE = (
    "partial_rollout.placement=separate",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
)
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def test_two_engines_beside_one_trainer_come_back_after_their_deaths(start, wait_for):
    """The engine of one is killed, and then the server of the other; each successor loads the next version and decodes its
    share."""
    run = start(
        *SEPARATE,
        "data.train_max_samples=32",
        "trainer.total_training_steps=null",
        "data.max_response_length=400",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "partial_rollout.failures.replica_restarts=2",
        "partial_rollout.resume_kv=recompute",
    )
    metrics = run.directory / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"training/global_step"' in metrics.read_text(), "the first step")
    killed, orphan = processes_of_session(run.process.pid, "VLLM::EngineCore")
    server = orphan.parent()
    killed.kill()
    wait_for(lambda: run.read().steps.keys() >= {1, 2, 3}, "the third step")
    assert "RecipeVLLMServer" in " ".join(server.cmdline())
    server.kill()
    assert run.process.wait(300) == 0, run.terminal()[-3000:]
    result, _ = audit(run.directory)
    assert result.violations == [] and result.complete and len(result.trained.all) == 32
    read = run.read()
    restarted = {s: metrics["partial_rollout/failures/replicas_restarted_total"] for s, metrics in read.steps.items()}
    assert restarted[8] == 2
    whole = min(step for step, count in restarted.items() if count == 2)
    tokens = [0, 0]
    for event in read.rounds:
        if event["step"] > whole:
            for replica, _start, _end, made, *_ in event["calls"]:
                tokens[replica] += made
    assert min(tokens) > 0.25 * sum(tokens), tokens
    assert not orphan.is_running(), "it would hold the memory of its device"
    assert all(step["partial_rollout/timing/stage_s"] < 10 for step in run.read().steps.values())


def test_killed_receiver_of_weights_ends_the_run_by_the_name_of_its_engine(start, wait_for):
    run = start(*SEPARATE, "data.max_response_length=64", "trainer.total_training_steps=50")
    metrics = run.directory / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"training/global_step"' in metrics.read_text(), "the first step")
    processes_of_session(run.process.pid, "ray::CheckpointEngineWorker")[0].kill()
    began = time.monotonic()
    assert run.process.wait(60) == 1, run.terminal()[-3000:]
    assert time.monotonic() - began < 30.0
    error = run.terminal()[run.terminal().index("training failed:") :]
    assert "failed in vLLM replica" in error, error


def test_load_that_fails_in_the_engine_ends_the_run_by_name(start, wait_for, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    extension = "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=bad_sync.FailingExtension"
    run = start(*SEPARATE, "data.max_response_length=32", "trainer.total_training_steps=3", extension)
    wait_for(lambda: "Training Progress" in run.terminal(), "training")
    assert run.process.wait(90) == 1, run.terminal()[-3000:]
    error = run.terminal()[run.terminal().index("training failed:") :]
    assert "loading of version 1 failed in vLLM replica" in error and "no_such_weight" in error, error
