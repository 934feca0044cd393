"""``plan``: what it recommends, prints, measures and refuses; replays of a run with separate placement."""

import itertools
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling, ToolCalls
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.tools import plan, plan_measure
from recipe.partial_rollout.tools.plan_cost import Prices, cost_table
from recipe.partial_rollout.tools.plan_measure import Burst, decoded_lengths, predicted_s
from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve
from recipe.partial_rollout.tools.replay import measured_steps, replay, trainer_of
from recipe.partial_rollout.tools.run_record import load_run
from tests.unit.runs import PHASES, interrupted_run, separate_run

LOGNORMAL = ["--lognormal", "300", "360", "1838", "--batch", "8", "--group", "4", "--slots", "16", "--rounds", "4"]
TRUE = EngineCurve(8e-3, 70e-6, 49e-9, 83e-6)


def test_cost_is_of_all_gpus_for_whole_steps():
    table = cost_table([("noPR", 120.0), ("bounded 1", 30.0)], Prices(gpus=8, train_s=60.0, price=2.5))
    assert table.rows == [
        ["noPR", "120.0", "180.0", "400.0", "1,000", "1.00"],
        ["bounded 1", "30.0", "90.0", "200.0", "500", "0.50"],
    ]
    assert cost_table([("noPR", 36.0)], Prices(1, 0.0, None)).rows[0][3:5] == ["10.0", "-"], "without a price"


def test_plan_recommends_from_a_distribution_and_a_preset_or_a_saved_curve(capsys, tmp_path):
    arguments = [*LOGNORMAL, "--replicas", "2", "--overlaps", "1", "--policies", "in_order"]
    arguments += ["--overtake", "null", "0.5"]
    saves = ["--json", str(tmp_path / "plan.json"), "--save-curve", str(tmp_path / "curve.json")]
    assert plan.main([*arguments, "--curve", "h100-qwen3-4b", "--train-seconds", "10", *saves]) == 0
    out = capsys.readouterr().out
    assert "recommended: partial_rollout.overlap=" in out and "engine curve: ASSUMED (preset h100-qwen3-4b)" in out
    assert "Cost of 1,000 steps on 2 GPUs" in out
    plans = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert [plan["overtake"] for plan in plans] == [None, None, 0.5]
    first, kept, overtaken = (option["forecast"]["first_length"] for option in plans)
    assert overtaken < kept == first == 1, "what a limit on overtaking costs in bias"
    again = ["--curve", str(tmp_path / "curve.json"), "--json", str(tmp_path / "again.json")]
    assert plan.main([*arguments, *again]) == 0
    assert "ASSUMED" not in capsys.readouterr().out
    assert json.loads((tmp_path / "again.json").read_text())["plans"] == plans


def test_plan_from_the_lengths_of_a_real_model_forecasts_what_its_pr_run_measured(tmp_path):
    """docs/performance/log.md, SmolLM2: PR took 70 of noPR's 134 s for the same groups, at a staleness of .92."""
    run = str(Path(__file__).parents[2] / "docs" / "performance" / "smollm_noPR")
    saved = tmp_path / "plan.json"
    assert plan.main(["--run", run, "--policies", "bounded", "--overlaps", "1", "--json", str(saved)]) == 0
    nopr, pr = (option["forecast"] for option in json.loads(saved.read_text())["plans"])
    assert pr["round_s"] / nopr["round_s"] == pytest.approx(70 / 134, rel=plan.TOLERANCE)
    assert pr["staleness_mean"] == pytest.approx(0.92, rel=plan.TOLERANCE)


def bursts():
    """As an engine of the curve ``TRUE`` would serve them, but for 1% of noise."""
    generator = np.random.default_rng(0)
    loads = itertools.product((1, 8, 32, 96, 256), (64, 2048), decoded_lengths(128))
    for at, (running, context, tokens) in enumerate(loads):
        bare = Burst(running, context, (EngineCall(0, 0.0, 1.0, tokens, 0),))
        ends = 1000.0 * at + predicted_s(TRUE, bare) * (1 + 0.01 * generator.standard_normal(running))
        read = {"resumed_tokens": context, "context_tokens": context}
        calls = tuple(EngineCall(0, 1000.0 * at, end, tokens, 0, **read) for end in ends.tolist())
        yield Burst(running, context, calls)


def test_measured_curve_is_the_engines_and_saved_for_plans(tmp_path, monkeypatch, capsys):
    async def drive(options):
        return list(bursts()), 340_000

    monkeypatch.setattr(plan_measure, "_drive", drive)
    path = tmp_path / "curve.json"
    assert plan.main(["--measure", "model", "--save-curve", str(path)]) == 0
    saved = EngineCurve.load(path)
    for name in ("step_s", "sample_s", "context_s", "prefill_s"):
        assert getattr(saved, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    assert saved.kv_tokens == 340_000 and f"plan with --curve {path}" in capsys.readouterr().out


@pytest.mark.parametrize("vocabulary", [2, 150, 151_936])
def test_prompts_have_tokens_of_the_models_vocabulary(vocabulary):
    prompt = plan_measure.random_prompt(random.Random(0), 1000, vocabulary)
    assert len(prompt) == 1000 and min(prompt) >= 0 and max(prompt) < vocabulary


PRESET = [*LOGNORMAL, "--policies", "bounded", "--placement", "separate", "--replicas", "4", "--curve", "h20-qwen3-4b"]


def test_split_stands_beside_colocated_and_nopr(capsys, tmp_path):
    arguments = [*PRESET, "--overlaps", "0.5", "1", "--price", "2", "--json", str(tmp_path / "plan.json")]
    assert plan.main(arguments) == 0
    out = capsys.readouterr().out
    rows = [line.split()[:3] for line in out.splitlines()]
    assert ["separate", "bounded", "1"] in rows and ["colocated", "bounded", "1"] in rows
    assert "trainer, ASSUMED (preset h20-qwen3-4b)" in out and "GPU-hours of 1,000 steps" in out
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert plan.main([*arguments, "--train-seconds", "10"]) == 0
    assert "trainer, ASSUMED" not in capsys.readouterr().out, "a speed that is given replaces the preset's"
    assert all(option["forecast"]["engines"] + option["forecast"]["trainers"] == 4 for option in figures["separate"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PRESET, "--replicas", "1"], "--replicas is 1; --placement separate needs at least 2"),
        ([*PRESET, "--overlaps", "9"], "no --overlaps between 0 and max_staleness=4"),
        ([*PRESET, "--hold-seconds", "-1"], "--hold-seconds is -1; it should be at least 0"),
        ([*PRESET, "--train-seconds", "5", "--train-fixed", "6"], "--train-fixed is 6; it should be at most the 5 s"),
        ([*PRESET, "--price", "-1"], "--price is -1; it should be at least"),
        ([*PRESET, "--validate", "/nowhere"], "--placement separate with --validate"),
        (["--group", "4"], "no lengths: give --run or --lognormal"),
        ([], "--group is missing: give it, or --run"),
        ([*LOGNORMAL, "--replicas", "2"], "no engine curve: give --run or --curve"),
        ([*LOGNORMAL, "--replicas", "2", "--curve", __file__], f"{__file__} is no engine curve"),
        (["--run", "/nowhere"], "/nowhere: no such directory"),
        ([*LOGNORMAL, "--hold-seconds", "1"], "--hold-seconds is 1; it needs --placement separate"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_a_line(capsys, arguments, message):
    assert plan.main(arguments) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"error: {message}") and out.count("\n") == 1


ADMISSION = Admission(Mode.WINDOW, 2, 2, 1.0, 4, 8, 4)


def build(path, *, more=()):
    return load_run(separate_run(path, phases=[*PHASES, *more]))


def test_trainer_works_from_batch_to_batch_but_for_waits_staging_and_holds(tmp_path):
    steps = measured_steps(build(tmp_path / "a"))
    assert steps.whole_s == pytest.approx([12, 20]) and steps.train_s == pytest.approx([7, 7])
    assert steps.trained_tokens == [200, 200]
    assert (steps.update.stage_s, steps.update.hold_s) == (pytest.approx(2), pytest.approx(1))
    assert trainer_of(steps)(200) == pytest.approx(7)
    steps = measured_steps(build(tmp_path / "b", more=[("validate", 1, 12, 14), ("flush", 2, 24, 25)]))
    assert steps.whole_s == pytest.approx([10, 19]) and steps.train_s == pytest.approx([5, 6])


def test_replay_is_as_long_as_the_training_where_engines_are_fast(tmp_path, monkeypatch):
    settings = SimpleNamespace(enable=True, adapts_overlap=False, group_filter=None, drain=True, slots_per_replica=8)
    settings.scheduling, settings.resume_kv, settings.tools = Scheduling(), "keep", ToolCalls()
    made = {"PartialRolloutConfig.from_config": settings, "Admission.of": ADMISSION, "fit": EngineCurve(0.001, 0.0)}
    for name, value in made.items():
        monkeypatch.setattr(f"recipe.partial_rollout.tools.replay.{name}", lambda _, value=value: value)
    run = build(tmp_path / "a")
    with pytest.raises(ValueError, match=r"config\.yaml is missing"):
        replay(run)
    OmegaConf.save({}, tmp_path / "a" / "config.yaml")
    # 400 tokens in 32 s; of each of the two steps between batches 7 s are training, 2 s staging, and 1 s a hold.
    found = replay(run)
    assert (found.measured_ms, found.forecast_ms) == (pytest.approx(80e3), pytest.approx(50e3, rel=1e-3))


def test_plan_from_a_run_with_tools_says_what_giving_slots_away_gains(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan, "fit", lambda calls: EngineCurve(0.1, 0.0))
    arguments = ["--run", str(interrupted_run(tmp_path / "run")), "--overlaps", "1", "--policies", "bounded"]
    # Of 24 samples four have a tool's 1 s; with plenty of slots it gains nothing.
    assert plan.main([*arguments, "--rounds", "4", "--slots", "64"]) == 0
    assert re.search(r"tools: 0\.17 s of a sample; .* by 1\.00 at overlap 1", capsys.readouterr().out)
