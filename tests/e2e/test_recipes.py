"""The GSM8K pair through recipe.sh, scaled down by overrides alone: a tiny random model, hand-written problems."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.partial_rollout.tasks.trace_task.prepare import write_model
from recipe.partial_rollout.tools.data.command import main as write_data

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "tests" / "samples" / "gsm8k"
# Two trainings, one after the other, in a fixture.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.nightly]

SCALED_DOWN = (
    "platform=cpu",
    "data.train_batch_size=4",
    "data.max_prompt_length=96",
    "data.max_response_length=96",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=192",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "trainer.logger=[file]",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "trainer.save_freq=-1",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The variables of the script, with a model of 32 tokens, which ends a response after 32 of them on average."""
    root = tmp_path_factory.mktemp("recipe")
    assert write_data(["gsm8k", "--out", str(root / "data"), "--from", str(SAMPLE)]) == 0
    write_model(root / "model", "tiny", vocabulary=32, seed=0)
    return {
        "MODEL": str(root / "model"),
        "DATA": str(root / "data"),
        "OUT": str(root / "out"),
        "PYTHON": sys.executable,
    }


def run_script(experiment, arm, inputs, **variables):
    return subprocess.run(
        ["bash", str(ROOT / "run_scripts" / "recipe.sh"), experiment, arm, *SCALED_DOWN],
        env={**os.environ, **inputs, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
    )


@pytest.fixture(scope="module")
def pair(inputs, count_start, read_run):
    runs = {}
    for arm in ("nopr", "pr"):
        count_start()
        done = run_script("gsm8k_1gpu_0.6b", arm, inputs)
        assert done.returncode == 0, done.stdout[-3000:]
        runs[arm] = read_run(Path(inputs["OUT"]) / arm)
    return runs


@pytest.mark.parametrize("arm", ["nopr", "pr", "colocate_async"])
@pytest.mark.parametrize("experiment", ["gsm8k_1gpu_0.6b", "gsm8k_calculator_1gpu_0.6b"])
def test_check_passes_where_everything_is_there(inputs, experiment, arm):
    done = run_script(experiment, arm, inputs, DRY_RUN="1")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "4 prompts x 4 samples" in done.stdout and "FAIL" not in done.stdout


def test_both_arms_train_through_the_script_with_verls_rewards(pair):
    for arm, run in pair.items():
        assert sorted(run.steps) == [1, 2], arm
        assert all(len(event["trained"]) == 4 for event in run.rounds) and run.run["complete"], arm
        validated = [key for key in run.steps[2] if key.startswith("val-core/openai/gsm8k/")]
        assert validated and all(run.steps[2][key] == 0.0 for key in validated)
    assert [pair[arm].run["arm"] for arm in ("nopr", "pr")] == ["noPR", "PR"]
