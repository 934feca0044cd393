"""``plan --placement separate``: the split that it chooses, what it prints, and what it refuses."""

import argparse
import json

import numpy as np
import pytest

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.engine_curve import Cluster, EngineCurve
from recipe.partial_rollout.planner.rounds import WeightUpdate
from recipe.partial_rollout.planner.samples import LengthTrace
from recipe.partial_rollout.planner.separate import TrainerRate
from recipe.partial_rollout.tools import plan_cost, plan_separate
from recipe.partial_rollout.tools.plan import main as plan

LOGNORMAL = ["--lognormal", "300", "360", "1838", "--batch", "8", "--group", "4", "--slots", "16", "--rounds", "4"]
SMALL = [*LOGNORMAL, "--policies", "bounded", "--overlaps", "0.5", "1", "--placement", "separate"]
PRESET = [*SMALL, "--replicas", "4", "--curve", "h20-qwen3-4b"]


def devices_of(*arguments, record=None, replicas=4):
    parser = argparse.ArgumentParser()
    parser.add_argument("--curve")
    parser.add_argument("--overlaps", type=float, nargs="+", default=[1.0])
    plan_cost.add_arguments(parser)
    plan_separate.add_arguments(parser)
    options = parser.parse_args(["--placement", "separate", *arguments])
    lengths = LengthTrace(np.full((4, 4), 100))
    admission = Admission(Mode.WINDOW, 10, 4, 0.0, 20, 40, 4)
    return plan_separate.devices_of(options, record, Cluster(EngineCurve(1.0, 0.1), replicas, 8), lengths, admission)


def test_split_is_printed_beside_colocated_and_nopr_with_gpu_hours(capsys, tmp_path):
    assert plan([*PRESET, "--price", "2", "--json", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "Forecast of whole steps on 4 GPUs" in out and "GPU-hours of 1,000 steps" in out
    rows = [line.split()[:3] for line in out.splitlines()]
    assert ["separate", "bounded", "1"] in rows and ["colocated", "bounded", "1"] in rows
    assert "trainer, ASSUMED (preset h20-qwen3-4b)" in out and "separate placement has run on CPU cores only" in out
    figures = json.loads((tmp_path / "plan.json").read_text())
    for option in figures["separate"]:
        best, tried = option["forecast"], option["tried"]
        assert best["engines"] + best["trainers"] == 4
        assert best["trained_tokens_per_s"] == max(other["trained_tokens_per_s"] for other in tried)
    assert "under an overlap of 1 the trainer waits" not in out or "overlap=0.5" in out


def test_trainer_rate_is_of_the_seconds_given():
    assert devices_of("--train-seconds", "30", "--train-fixed", "10", "--hold-seconds", "1").trainer == TrainerRate(
        10.0, 20 * 4 / 4000
    )


def test_speeds_that_are_given_replace_those_of_the_preset():
    preset = devices_of("--curve", "h20-qwen3-4b")
    assert (preset.trainer, preset.update) == (TrainerRate(15.0, 0.65e-3), WeightUpdate(5.0, 1.0))
    given = devices_of("--curve", "h20-qwen3-4b", "--train-fixed", "3", "--stage-seconds", "0", "--hold-seconds", "2")
    assert (given.trainer, given.update) == (TrainerRate(3.0, 0.65e-3), WeightUpdate(0.0, 2.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [*SMALL, "--replicas", "1", "--curve", "h20-qwen3-4b"],
            "--replicas is 1; --placement separate needs at least 2",
        ),
        ([*PRESET, "--overlaps", "9"], "no --overlaps between 0 and max_staleness=4: without spare groups one side"),
        ([*PRESET, "--max-staleness", "0"], "no --overlaps between 0 and max_staleness=0"),
        ([*PRESET, "--hold-seconds", "-1"], "--hold-seconds is -1; it should be at least 0"),
        ([*PRESET, "--train-seconds", "5", "--train-fixed", "6"], "--train-fixed is 6; it should be at most the 5 s"),
        ([*PRESET, "--validate", "/nowhere"], "--placement separate with --validate: a replayed run has"),
        ([*PRESET, "--measure", "/nowhere"], "--placement separate with --measure: that only measures an engine"),
        ([*LOGNORMAL, "--hold-seconds", "1"], "--hold-seconds is 1; it needs --placement separate"),
        ([*LOGNORMAL, "--train-fixed", "1"], "--train-fixed is 1; it needs --placement separate"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_a_line(capsys, arguments, message):
    assert plan(arguments) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"error: {message}") and out.count("\n") == 1
