"""The nine figures of a dashboard: the same keys in both arms, and what verl's validation gives them."""

import numpy as np
import pytest
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from recipe.partial_rollout.records.figures import FIGURES, SECTION, overview
from recipe.partial_rollout.tasks.answers import compute_score

KEYS = [f"{SECTION}/{figure}" for figure in FIGURES]
STEP = {"training/global_step": 3, "timing_s/step": 9.0, "timing_s/gen": 4.0, "val-core/gsm8k/acc/mean@4": 0.5}
ROLLOUT = {"rollout/bubble_fraction": 0.2, "rollout/tokens_per_s": 100.0}
PR_ONLY = {"staleness/mean": 0.7, "staleness/max": 2, "off_policy_token_fraction": 0.3, "length/bias": 0.9}


def ours(figures):
    return {f"partial_rollout/{name}": value for name, value in figures.items()}


def test_both_arms_log_the_nine_figures_under_the_same_keys_and_the_share_of_tools_where_there_are_any():
    nopr = overview(STEP | ours(ROLLOUT), partial=False)
    pr = overview(STEP | ours(ROLLOUT) | ours(PR_ONLY), partial=True)
    assert list(nopr) == list(pr) == KEYS
    assert [[figures[key] for key in KEYS[-4:]] for figures in (nopr, pr)] == [[0, 0, 0, 1], [0.7, 2, 0.3, 0.9]]
    timers = {"timing_s/agent_loop/tool_calls/mean": 1.0, "timing_s/agent_loop/generate_sequences/mean": 3.0}
    assert overview(STEP | ours(ROLLOUT) | timers, partial=False) == {**nopr, f"{SECTION}/tool_share": 0.25}
    # A validation before training has its reward only: the mean of its sets.
    sets = {"aime24/acc/mean@32": 0.2, "gsm8k/acc/mean@4": 0.8, "gsm8k/acc/best@4/mean": 1.0}
    validation = {f"val-core/{name}": value for name, value in sets.items()}
    assert overview(validation, partial=True) == {f"{SECTION}/held_out_reward": 0.5}


@pytest.mark.parametrize(
    ("source", "answers", "truth"),
    [("openai/gsm8k", ["#### 7"] * 3 + ["#### 3"], "7"), ("math_dapo", ["Answer: 42"] * 3 + ["Answer: 41"], "42")],
)
def test_validation_logs_accuracy_best_and_majority_of_the_recipes_reward(source, answers, truth):
    def validated(answers):
        """What verl logs of a validation with these answers to one prompt."""
        results = [compute_score(source, answer, truth) for answer in answers]
        infos = {"reward": [result["score"] for result in results]}
        infos |= {key: [result[key] for result in results] for key in results[0]}
        sources, uids = np.array([source] * len(answers)), ["0"] * len(answers)
        return RayPPOTrainer._val_metrics_update(None, sources, uids, infos, [])

    logged, core = validated(answers), f"val-core/{source}/acc"
    assert logged[f"{core}/mean@4"] == 0.75 == overview(logged, partial=True)[f"{SECTION}/held_out_reward"]
    assert logged[f"{core}/maj@4/mean"] > 0.75
    missing = validated([answers[0], "no idea", "none", "hm"])
    assert missing[f"{core}/maj@4/mean"] < 0.3, "a majority of missing answers is wrong"
