"""A training on warm engines is one in a fresh process: the same weights, its own versions and records."""

import json
import sys

import pytest

from recipe.partial_rollout.tools.audit import audit
from tests.studies.arm import MAIN
from tests.studies.processes import WarmProcess, run_fresh

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

SMALL = (
    "data.train_batch_size=4",
    "data.train_max_samples=16",
    "data.max_response_length=300",
    "data.val_max_samples=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    # greedy: what the engine answers depends on its weights alone
    "actor_rollout_ref.rollout.val_kwargs.do_sample=False",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0",
    # every step changes the weights, whatever the rewards are
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "trainer.logger=[file]",
    "trainer.val_before_train=True",
    "trainer.test_freq=3",
    "trainer.total_training_steps=3",
    "partial_rollout.drain=False",
)


def answers(directory, step):
    """What the engine answered in the validation after ``step``."""
    return sorted(json.loads(line)["output"] for line in (directory / "val" / f"{step}.jsonl").open())


def test_second_training_on_warm_engines_begins_as_in_a_fresh_process(task, count_start, tmp_path, read_run):
    def command(name, rate):
        directory = tmp_path / name
        directory.mkdir()
        places = [f"trainer.default_local_dir={directory}", f"trainer.validation_data_dir={directory / 'val'}"]
        overrides = [f"quickstart.dir={task}", *places, *SMALL, f"actor_rollout_ref.actor.optim.lr={rate}"]
        return [sys.executable, "-m", *MAIN, "--config-name", "quickstart_cpu", *overrides], directory

    count_start()
    with WarmProcess() as process:
        first, second = command("first", 1e-2), command("second", 1e-4)
        assert process.run(*first) == 0, (first[1] / "terminal.log").read_text()[-3000:]
        assert process.run(*second) == 0, (second[1] / "terminal.log").read_text()[-3000:]
    assert "on warm engines" in (second[1] / "terminal.log").read_text()
    count_start()
    fresh = command("fresh", 1e-4)
    assert run_fresh(*fresh) == 0
    assert answers(first[1], 0) != answers(first[1], 3), "the engines held other weights when the second began"
    assert answers(second[1], 0) == answers(fresh[1], 0)
    for _, directory in (first, second):
        run, (result, _) = read_run(directory), audit(directory)
        assert run.run["complete"] and sorted(run.steps) == [1, 2, 3]
        assert [event["step"] for event in run.rounds] == [1, 2, 3]
        assert result.violations == [] and result.lost == 0
        # Engine and trainer agree on the tokens of version 0: neither kept KV blocks nor weights are of another run.
        assert run.steps[1]["rollout_corr/k3_kl"] < 1e-6
        assert run.steps[1]["partial_rollout/staleness/max"] == 0
    (first_step, second_step) = (read_run(directory).steps[1] for _, directory in (second, fresh))
    assert first_step["actor/lr"] == second_step["actor/lr"] == 1e-4
