"""Prometheus: our gauges, and a Grafana dashboard that asks for metrics which exist."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from omegaconf import OmegaConf

from recipe.partial_rollout.records.figures import FIGURES, SECTION
from recipe.partial_rollout.training.step_log import PREFIX, Gauges

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "partial_rollout.json"
SUFFIXES = "_total|_bucket|_sum|_count"


class Gauge:
    made: ClassVar = {}

    def __init__(self, name, description, tag_keys):
        self.tag_keys, self.value = tag_keys, None
        self.made[name] = self

    def set_default_tags(self, tags):
        assert set(tags) == set(self.tag_keys)

    def set(self, value):
        self.value = value


def expressions():
    dashboard = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_a_step_sets_the_gauges_of_its_figures():
    gauges = Gauges(Gauge, {"project": "p", "experiment": "PR"})
    gauges.set({f"{SECTION}/step_s": 12.5, f"{SECTION}/bubble": 0.2, f"{SECTION}/tool_share": 0.3})
    assert {name: gauge.value for name, gauge in Gauge.made.items() if gauge.value is not None} == {
        f"{PREFIX}_step_s": 12.5,
        f"{PREFIX}_bubble": 0.2,
    }


def test_a_run_that_does_not_ask_for_prometheus_has_no_gauges():
    assert Gauges.of(OmegaConf.create({"actor_rollout_ref": {"rollout": {"prometheus": {"enable": False}}}})) is None


def test_the_dashboard_asks_for_every_gauge_of_ours_and_no_other():
    asked = {name for each in expressions() for name in re.findall(rf"ray_{PREFIX}_(\w+)", each)}
    assert asked == set(FIGURES)


def test_the_dashboard_asks_for_metrics_that_this_vllm_has():
    sources = Path(find_spec("vllm").submodule_search_locations[0], "v1", "metrics")
    known = set(re.findall(r'"(vllm:\w+)"', "".join(path.read_text() for path in sources.glob("*.py"))))
    asked = {re.sub(rf"({SUFFIXES})$", "", name) for each in expressions() for name in re.findall(r"vllm:\w+", each)}
    assert len(asked) >= 8 and asked <= known
