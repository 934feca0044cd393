"""What the recipe promises holds on this machine's device: ``pytest -m gpu``, 20 minutes on one GPU.

With these go the tests of holds and log-probs (``tests/e2e``), on an engine as vLLM configures it on the device. What fails
may pass with VLLM_USE_V2_MODEL_RUNNER=0, or with PARTIAL_ROLLOUT_TEST_ENGINE='{"async_scheduling": false}': that names the
part of vLLM to blame.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.tools.run_record import load_run
from tests.gpu import judged
from tests.gpu.accept import RUN
from tests.gpu.training import TERMINAL, TINY, Sizes, Trace, command, steps_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]

ON_CPU = os.environ.get("VERL_PLATFORM") == "cpu"
DEVICE_ALONE = pytest.mark.skipif(ON_CPU, reason="needs a device")
TRACE = TINY if ON_CPU else Trace("0.6b", 151_936, 250, 0.6, Sizes(prompts=16, samples=4, seats=128, cap=1024))
STEPS, LIMIT_S = 4, 1200
MOST_K3, MOST_ERROR = 0.005, 0.03
"""nats a token: divergence of the trainer from the engine, and the update's log-probs from a forward pass's"""
NO_K3 = 1e-6
"""divergence that is rounding of float32, of which a ratio says nothing"""
MASKED_APART = 0.003
"""shares of masked tokens of two ages are alike within it, in four batches of 64 responses"""
INTERRUPT_S = 3.0 if ON_CPU else 0.1
"""beyond an engine step; the CPUs of a test machine have other work"""
LEAST_FREED_GIB = 40.0


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A finished run of PR: the one that the environment names, or one of this session."""
    if RUN in os.environ:
        return Path(os.environ[RUN])
    folder = tmp_path_factory.mktemp("accept")
    task = TRACE.write(folder)
    engine = json.loads(os.environ.get("PARTIAL_ROLLOUT_TEST_ENGINE", "{}"))
    more = [f"+actor_rollout_ref.rollout.engine_kwargs.vllm.{key}={value}" for key, value in engine.items()]
    asked = command("PR", folder / "PR", STEPS, [*TRACE.overrides(task), *more], tiny=ON_CPU)
    steps = list(steps_of(asked, folder / "PR", time.monotonic() + LIMIT_S))
    assert len(steps) == STEPS, f"killed after {LIMIT_S} s and {len(steps)} steps"
    return folder / "PR"


@pytest.fixture(scope="session")
def run(directory):
    return load_run(directory)


@pytest.fixture(scope="session")
def terminal(directory):
    return (directory / TERMINAL).read_text(errors="replace")


def series(run, key):
    return [step.metrics[key] for step in run.steps if key in step.metrics]


def test_check_finds_nothing_that_stops_a_run():
    done = subprocess.run(
        [sys.executable, "-m", "recipe.partial_rollout.tools", "check"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout


def test_engine_and_trainer_agree_in_every_step(run):
    k3 = series(run, "rollout_corr/k3_kl")
    assert len(k3) == len(run.steps) and max(k3) < MOST_K3
    assert k3[-1] <= max(2 * k3[0], NO_K3), "it grows"


def test_update_computes_the_log_probs_of_a_pass(run):
    errors = series(run, "partial_rollout/proximal/error")
    assert errors and max(errors) < MOST_ERROR


def test_old_tokens_are_masked_no_more_often_than_new_ones(run):
    newest, older = judged.masked_shares(run.steps)
    assert abs(newest - older) <= MASKED_APART, (newest, older)


def test_responses_are_interrupted_and_resumed(run):
    assert judged.resumed(run) > 0 and max(age for step in run.steps for age in step.staleness) >= 1


def test_every_response_is_as_long_as_its_row_says(run, directory):
    config = OmegaConf.load(directory / "config.yaml")
    assert judged.wrong_lengths(run, Path(config.data.train_files)) == 0


def test_interruption_waits_little_longer_than_a_token(run):
    slowest = max(step.round.interrupt_s or 0.0 for step in run.steps)
    assert 0 < slowest < INTERRUPT_S + judged.token_s(run)


def test_audit_finds_every_prompt_trained_once(directory):
    result, _ = audit(directory)
    assert result.violations == [] and result.trained


@DEVICE_ALONE
def test_sleep_frees_the_engines_memory_in_every_round(run, terminal):
    freed = [gib for gib in judged.slept(terminal) if gib >= LEAST_FREED_GIB]
    assert len(freed) >= len(run.steps), freed


@DEVICE_ALONE
def test_engine_schedules_asynchronously_with_runner_v2(terminal):
    assert "engine: model runner V2, asynchronous scheduling" in terminal
