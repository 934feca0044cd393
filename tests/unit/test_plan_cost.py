"""GPU-hours of a plan, and the curve that is read off measured bursts."""

import argparse
import itertools
import json
import random
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from recipe.partial_rollout.planner.engine_curve import PRESETS, CurveError, EngineCurve
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.tools import plan, plan_measure
from recipe.partial_rollout.tools.plan_cost import Prices, add_arguments, cost_table, curve_source, prices_of
from recipe.partial_rollout.tools.plan_measure import Burst, curve_of, decoded_lengths, fit_table, predicted_s

TRUE = EngineCurve(8e-3, 70e-6, 49e-9, 83e-6)
LOGNORMAL = ["--lognormal", "300", "360", "1838", "--batch", "4", "--group", "4", "--replicas", "2", "--slots", "16"]


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def record(*seconds):
    """A run whose steps take (step, rollout) seconds."""
    return SimpleNamespace(
        steps=[SimpleNamespace(seconds={"step": step, "gen": gen}.__getitem__) for step, gen in seconds]
    )


def test_cost_is_of_all_gpus_for_whole_steps():
    table = cost_table([("noPR", 120.0), ("bounded 1", 30.0)], Prices(gpus=8, train_s=60.0, price=2.5))
    assert table.rows == [
        ["noPR", "120.0", "180.0", "400.0", "1,000", "1.00"],
        ["bounded 1", "30.0", "90.0", "200.0", "500", "0.50"],
    ]


def test_cost_without_a_price_is_in_gpu_hours_only():
    assert cost_table([("noPR", 36.0)], Prices(1, 0.0, None)).rows[0][3:5] == ["10.0", "-"]


def test_train_seconds_are_those_of_the_run_unless_given():
    run = record((30.0, 20.0), (50.0, 38.0), (99.0, 1.0))
    assert prices_of(options(), run, replicas=4) == Prices(4, 12.0, None)
    given = options("--train-seconds", "5", "--gpus-per-replica", "2", "--price", "3")
    assert prices_of(given, run, replicas=4) == Prices(8, 5.0, 3.0)
    assert prices_of(options(), None, replicas=4) is None


@pytest.mark.parametrize("bad", [["--price", "-1"], ["--train-seconds", "-2"], ["--gpus-per-replica", "0"]])
def test_option_out_of_its_range_is_named(bad):
    with pytest.raises(ValueError, match=f"{bad[0]} is {bad[1]}; it should be at least"):
        prices_of(options(*bad), None, replicas=1)


def test_preset_is_called_assumed():
    assert "ASSUMED" in curve_source("h20-qwen3-4b") and "ASSUMED" not in curve_source("mine.json")


def test_plan_prints_costs_and_what_the_curve_is(capsys):
    costs = ["--train-seconds", "10", "--price", "2", "--rounds", "4", "--policies", "bounded", "--overlaps", "1"]
    assert plan.main([*LOGNORMAL, "--curve", "h20-qwen3-4b", *costs]) == 0
    shown = capsys.readouterr().out
    assert "engine curve: ASSUMED (preset h20-qwen3-4b)" in shown
    assert "Cost of 1,000 steps on 2 GPUs" in shown and "GPU-hours" in shown


def test_plan_without_train_seconds_says_what_its_costs_lack(capsys):
    assert plan.main([*LOGNORMAL, "--curve", "h20-qwen3-4b", "--rounds", "4", "--overlaps", "1"]) == 0
    assert "no GPU-hours: give --train-seconds" in capsys.readouterr().out


# -- measuring ---------------------------------------------------------------------------------------------------------


def measured(running, context, *, start, tokens=128, noise=0.0, seed=0):
    """A burst as an engine of the curve ``TRUE`` would serve it."""
    generator = np.random.default_rng(seed)
    bare = Burst(running, context, (EngineCall(0, 0.0, 1.0, tokens, 0),))
    seconds = predicted_s(TRUE, bare) * (1 + noise * generator.standard_normal(running))
    return Burst(
        running,
        context,
        tuple(
            EngineCall(0, start, start + s, tokens, 0, resumed_tokens=context, context_tokens=context)
            for s in seconds.tolist()
        ),
    )


def bursts(noise=0.0):
    loads = itertools.product((1, 8, 32, 96, 256), (64, 2048), decoded_lengths(128))
    return [
        measured(running, context, tokens=tokens, start=1000.0 * i, noise=noise, seed=i)
        for i, (running, context, tokens) in enumerate(loads)
    ]


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_curve_of_bursts_is_the_engines(noise):
    curve = curve_of(bursts(noise))
    for name in ("step_s", "sample_s", "context_s", "prefill_s"):
        assert getattr(curve, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name


def test_table_of_the_fit_shows_measured_beside_fitted():
    rows = fit_table(bursts(), TRUE).rows
    assert len(rows) == 20 and all(row[4] == "1.00" for row in rows)


@pytest.mark.parametrize("vocabulary", [2, 64, 150, 151_936])
def test_prompts_have_tokens_of_the_models_vocabulary(vocabulary):
    prompt = plan_measure.random_prompt(random.Random(0), 1000, vocabulary)
    assert len(prompt) == 1000 and min(prompt) >= 0 and max(prompt) < vocabulary
    assert vocabulary < 1000 or min(prompt) >= 100, "the first are often special"


def test_one_load_gives_no_curve():
    with pytest.raises(CurveError):
        curve_of([measured(8, 64, start=0.0)])


def test_measured_curve_is_saved_for_plans(tmp_path, monkeypatch, capsys):
    async def drive(options):
        return bursts(), 340_000

    monkeypatch.setattr(plan_measure, "_drive", drive)
    path = tmp_path / "curve.json"
    assert plan.main(["--measure", "model", "--save-curve", str(path)]) == 0
    saved = EngineCurve.load(path)
    assert saved.kv_tokens == 340_000 and saved.step_s == pytest.approx(TRUE.step_s, rel=0.1)
    assert asdict(saved) == json.loads(path.read_text())
    assert f"plan with --curve {path}" in capsys.readouterr().out
    assert saved not in PRESETS.values()
