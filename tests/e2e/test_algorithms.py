"""Every algorithm trains real steps under partial rollout, with and without a forward pass more, in one engine start-up."""

import importlib.util
import math
from pathlib import Path

import pytest

MATRIX = Path(__file__).with_name("algorithm_matrix.py")
# Rewards that differ within a group, so that no estimator's advantages are all zero.
SMALL = (
    "data.train_batch_size=4",
    "data.train_max_samples=32",
    "data.max_response_length=200",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=280",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "reward.custom_reward_function.path=pkg://recipe.partial_rollout.tasks.trace_task.agent_loop",
    "partial_rollout.overlap=1.0",
    "partial_rollout.max_staleness=2",
)


def matrix():
    spec = importlib.util.spec_from_file_location("algorithm_matrix", MATRIX)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(module_train):
    """Two steps of each algorithm, then those without the forward pass over the batch."""
    last = matrix().STEPS
    run = module_train(*SMALL, f"trainer.total_training_steps={last}", "trainer.total_epochs=9", program=(str(MATRIX),))
    assert run.run["complete"] and sorted(run.steps) == list(range(1, last + 1))
    return run


@pytest.fixture(scope="module")
def steps(run):
    """Metrics of each algorithm's steps: name to a list of two."""
    names, each = matrix().ALGORITHMS, matrix().STEPS_EACH
    return {name: [run.steps[each * i + 1 + k] for k in range(each)] for i, name in enumerate(names)}


@pytest.mark.parametrize("name", matrix().ALGORITHMS)
def test_algorithm_trains_two_steps(steps, name):
    for step in steps[name]:
        assert math.isfinite(step["actor/pg_loss"]) and math.isfinite(step["actor/grad_norm"])
        assert step["actor/grad_norm"] > 0
        assert step["critic/advantages/max"] > 0
        # The weights that reached the loss, and that samples of older versions were among those trained.
        assert 0 < step["rollout_corr/rollout_is_mean"] <= 2
        assert 0 < step["rollout_corr/rollout_is_eff_sample_size"] < 1 + 1e-6
        assert step["partial_rollout/lost_samples"] == 0


def test_older_samples_are_trained_and_gspo_weighs_a_sequence(steps):
    assert max(step["partial_rollout/staleness/max"] for pair in steps.values() for step in pair) >= 1
    for step in steps["gspo"]:
        # By its geometric mean.
        greatest = math.exp(-step["rollout_corr/log_ppl_diff_min"])
        assert step["rollout_corr/rollout_is_max"] == pytest.approx(greatest, rel=1e-4)
    assert {name for name, pair in steps.items() if "actor/ppo_kl" not in pair[1]} == {"gpg"}


def test_update_gives_the_proximal_policy_and_the_pass_agrees(run):
    steps = {number: step for number, step in run.steps.items() if number >= matrix().FIRST_FROM_UPDATE}
    checked = [number for number in steps if (number - 1) % matrix().CHECK_EVERY == 0]
    assert len(steps) == 6 and len(checked) == 2
    for number, step in steps.items():
        assert ("partial_rollout/proximal/error" in step) is (number in checked)
        assert ("actor/entropy" in step) is (number in checked)
        # An estimate that is zero or more, but for float32's rounding where engine and trainer agree.
        assert step["rollout_corr/k3_kl"] > -1e-6 and math.isfinite(step["rollout_corr/kl"])
        assert 0 < step["rollout_corr/rollout_is_mean"] <= 2
        assert 0 < step["rollout_corr/rollout_is_eff_sample_size"] <= 1
        assert math.isfinite(step["actor/pg_loss"]) and step["actor/grad_norm"] > 0
        assert step.get("partial_rollout/proximal/error", 0.0) < 1e-5
    assert steps[checked[-1]]["partial_rollout/staleness/max"] >= 1
    assert [number for number, step in steps.items() if "timing_s/old_log_prob" in step] == checked
