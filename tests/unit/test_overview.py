"""The ten figures of a dashboard: the same keys in both arms, in Prometheus too, and what verl's validation gives them."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from recipe.partial_rollout.records.figures import FIGURES, SECTION, overview
from recipe.partial_rollout.tasks.answers import compute_score
from recipe.partial_rollout.training.step_log import PREFIX, Gauges

KEYS = [f"{SECTION}/{figure}" for figure in FIGURES]
STEP = {"training/global_step": 3, "timing_s/step": 9.0, "timing_s/gen": 4.0, "val-core/gsm8k/acc/mean@4": 0.5}
ROLLOUT = {"rollout/efficiency": 0.8, "rollout/bubble_fraction": 0.2, "rollout/tokens_per_s": 100.0}
PR_ONLY = {"staleness/mean": 0.7, "staleness/max": 2, "off_policy_token_fraction": 0.3, "length/bias": 0.9}


def ours(figures):
    return {f"partial_rollout/{name}": value for name, value in figures.items()}


def test_both_arms_log_the_ten_figures_under_the_same_keys_and_the_share_of_tools_where_there_are_any():
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


def expressions():
    dashboard = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "partial_rollout.json"
    panels = json.loads(dashboard.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_prometheus_has_the_ten_figures_of_a_step_where_a_run_asks_for_it_and_grafana_shows_them():
    made = {}

    def gauge(name, description, tag_keys):
        made[name.removeprefix(f"{PREFIX}_")] = found = Mock()
        return found

    gauges = Gauges(gauge, {"project": "p", "experiment": "PR"})
    gauges.set({f"{SECTION}/step_s": 12.5, f"{SECTION}/tool_share": 0.3})
    made["step_s"].set_default_tags.assert_called_once_with({"project": "p", "experiment": "PR"})
    made["step_s"].set.assert_called_once_with(12.5)
    assert set(made) == set(FIGURES)
    assert {name for each in expressions() for name in re.findall(rf"ray_{PREFIX}_(\w+)", each)} == set(FIGURES)
    assert Gauges.of(OmegaConf.create({"actor_rollout_ref": {"rollout": {"prometheus": {"enable": False}}}})) is None


def test_grafanas_dashboard_asks_for_metrics_that_this_vllm_has():
    sources = Path(find_spec("vllm").submodule_search_locations[0], "v1", "metrics")
    known = set(re.findall(r'"(vllm:\w+)"', "".join(path.read_text() for path in sources.glob("*.py"))))
    asked = {name for each in expressions() for name in re.findall(r"vllm:\w+", each)}
    asked = {re.sub("(_total|_bucket|_sum|_count)$", "", name) for name in asked}
    assert len(asked) >= 8 and asked <= known
