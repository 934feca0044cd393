"""The ten figures of a dashboard: the same keys in both arms, and what verl's own validation metrics give them."""

import numpy as np
import pytest
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.reward_score import default_compute_score

from recipe.partial_rollout.records.figures import FIGURES, SECTION, overview
from recipe.partial_rollout.tasks.answers import compute_score

KEYS = [f"{SECTION}/{figure}" for figure in FIGURES]
STEP = {"training/global_step": 3, "timing_s/step": 9.0, "timing_s/gen": 4.0, "val-core/gsm8k/acc/mean@4": 0.5}
ROLLOUT = {"rollout/efficiency": 0.8, "rollout/bubble_fraction": 0.2, "rollout/tokens_per_s": 100.0}
PR_ONLY = {"staleness/mean": 0.7, "staleness/max": 2, "off_policy_token_fraction": 0.3, "length/bias": 0.9}


def ours(figures):
    return {f"partial_rollout/{name}": value for name, value in figures.items()}


def test_both_arms_log_the_ten_figures_under_the_same_keys():
    nopr = overview(STEP | ours(ROLLOUT), partial=False)
    pr = overview(STEP | ours(ROLLOUT) | ours(PR_ONLY), partial=True)
    assert list(nopr) == list(pr) == KEYS
    assert [nopr[key] for key in KEYS[-4:]] == [0, 0, 0, 1]
    assert [pr[key] for key in KEYS[-4:]] == [0.7, 2, 0.3, 0.9]


@pytest.mark.parametrize("partial", [False, True], ids=["noPR", "PR"])
def test_tool_share_is_shown_last_where_there_are_tools(partial):
    def shown(tool_s):
        timers = {"timing_s/agent_loop/tool_calls/mean": tool_s, "timing_s/agent_loop/generate_sequences/mean": 3.0}
        return list(overview(STEP | timers, partial=partial).items())

    assert shown(1.0) == [*shown(0.0), (f"{SECTION}/tool_share", 0.25)]


def test_a_validation_before_training_has_its_reward_only():
    assert overview({"val-core/gsm8k/acc/mean@1": 0.25}, partial=False) == {f"{SECTION}/held_out_reward": 0.25}


# -- verl's validation metrics -------------------------------------------------------------------------------------------


def validated(source, answers, truth, score):
    """What verl logs of a validation with ``answers`` [prompt][k] to prompts of one data source."""
    results = [score(source, answer, truth) for group in answers for answer in group]
    infos = {"reward": [result["score"] if isinstance(result, dict) else result for result in results]}
    if isinstance(results[0], dict):
        infos |= {key: [result[key] for result in results] for key in results[0]}
    uids = [str(i) for i, group in enumerate(answers) for _ in group]
    return RayPPOTrainer._val_metrics_update(None, np.array([source] * len(uids)), uids, infos, [])


MOSTLY_RIGHT = [["#### 7", "#### 7", "#### 7", "#### 3"]]


def test_verls_gsm8k_reward_gives_no_majority():
    logged = validated("openai/gsm8k", MOSTLY_RIGHT, "7", default_compute_score)
    assert logged["val-core/openai/gsm8k/reward/mean@4"] == 0.75
    assert not [key for key in logged if "maj@" in key]


def test_the_recipes_gsm8k_reward_gives_accuracy_best_and_majority():
    logged = validated("openai/gsm8k", MOSTLY_RIGHT, "7", compute_score)
    core = "val-core/openai/gsm8k/acc"
    assert logged[f"{core}/mean@4"] == 0.75
    assert 0.95 < logged[f"{core}/best@4/mean"] <= 1
    assert logged[f"{core}/maj@4/mean"] > 0.75
    assert overview(logged, partial=True)[f"{SECTION}/held_out_reward"] == 0.75


def test_a_majority_of_missing_answers_is_wrong():
    logged = validated("openai/gsm8k", [["#### 7", "no idea", "none", "hm"]], "7", compute_score)
    assert logged["val-core/openai/gsm8k/acc/maj@4/mean"] < 0.3


@pytest.mark.parametrize("source", ["math_dapo", "aime24"])
def test_verls_dapo_reward_gives_accuracy_and_majority(source):
    answers = [["Answer: 42", "Answer: 42", "Answer: 42", "Answer: 41"]]
    logged = validated(source, answers, "42", compute_score)
    assert logged == validated(source, answers, "42", default_compute_score)
    core = f"val-core/{source}/acc"
    assert logged[f"{core}/mean@4"] == 0.75 and logged[f"{core}/maj@4/mean"] > 0.75
    assert overview(logged, partial=True)[f"{SECTION}/held_out_reward"] == 0.75, "accuracy, though the score is -1 or 1"


def test_the_mean_of_several_held_out_sets_is_shown():
    logged = {
        "val-core/aime24/acc/mean@32": 0.2,
        "val-core/gsm8k/acc/mean@4": 0.8,
        "val-core/gsm8k/acc/best@4/mean": 1.0,
    }
    assert overview(logged, partial=True) == {f"{SECTION}/held_out_reward": 0.5}
