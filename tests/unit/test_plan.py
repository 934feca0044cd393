"""``plan``: what it recommends, prints and refuses; replays of a run with separate placement."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.config.choices import ResumeKV
from recipe.partial_rollout.tools import plan
from recipe.partial_rollout.tools.plan_table import Option, advice
from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve
from recipe.partial_rollout.tools.replay import measured_steps, replay, trainer_of
from recipe.partial_rollout.tools.run_record import load_run
from tests.unit.runs import PHASES, interrupted_run, separate_run
from tests.unit.shared import settings_of

LOGNORMAL = ["--lognormal", "300", "360", "1838", "--batch", "8", "--group", "4", "--slots", "16", "--rounds", "4"]


def test_plan_recommends_from_a_distribution_and_a_preset_or_a_saved_curve(capsys, tmp_path):
    arguments = [*LOGNORMAL, "--replicas", "2", "--overlaps", "1", "--policies", "bounded"]
    arguments += ["--overtake", "0", "0.5"]
    saves = ["--json", str(tmp_path / "plan.json"), "--save-curve", str(tmp_path / "curve.json")]
    assert plan.main([*arguments, "--curve", "h100-qwen3-4b", *saves]) == 0
    out = capsys.readouterr().out
    assert "recommended: partial_rollout.overlap=" in out and "engine curve: ASSUMED (preset h100-qwen3-4b)" in out
    plans = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert [plan["overtake"] for plan in plans] == [None, 0, 0.5]
    first, kept, overtaken = (option["forecast"]["first_length"] for option in plans)
    assert overtaken < kept == first == 1, "what a limit on overtaking costs in bias"
    again = ["--curve", str(tmp_path / "curve.json"), "--json", str(tmp_path / "again.json")]
    assert plan.main([*arguments, *again]) == 0
    assert "ASSUMED" not in capsys.readouterr().out
    assert json.loads((tmp_path / "again.json").read_text())["plans"] == plans


def test_plan_from_the_lengths_of_a_real_model_forecasts_what_its_pr_run_measured(tmp_path):
    """tests/studies/results/log.md, SmolLM2: PR took 70 of noPR's 134 s for the same groups, at a staleness of .92."""
    run = str(Path(__file__).parents[2] / "tests" / "studies" / "results" / "smollm_noPR")
    saved = tmp_path / "plan.json"
    assert plan.main(["--run", run, "--policies", "bounded", "--overlaps", "1", "--json", str(saved)]) == 0
    nopr, pr = (option["forecast"] for option in json.loads(saved.read_text())["plans"])
    assert pr["round_s"] / nopr["round_s"] == pytest.approx(70 / 134, rel=plan.TOLERANCE)
    assert pr["staleness_mean"] == pytest.approx(0.92, rel=plan.TOLERANCE)


def forecast(speed):
    return SimpleNamespace(trained_tokens_per_s=speed, staleness_mean=speed / 10)


def options(*overlaps, policy="bounded"):
    """noPR and plans, each overlap a fifth faster than the one before."""
    return [Option("noPR", 0.0, None, forecast(10.0))] + [
        Option(policy, overlap, None, forecast(10.0 * 1.2**at)) for at, overlap in enumerate(overlaps, 1)
    ]


def test_only_what_learning_was_tested_with_is_recommended_and_at_its_price():
    said = advice(options(0.5, 1.0, 1.5, 3.0), 0.05, 8)
    assert "partial_rollout.overlap=1.5 with scheduling.policy=bounded, max_staleness=8: rollout 1.73 x noPR" in said
    assert "the largest planned whose learning was tested" in said
    assert "It costs mean staleness 1.73: the reward comes about as many steps later" in said
    for plans, bound in ((options(2.0, 3.0), 8), (options(1.0, policy="seed"), 4), (options(1.0), 9)):
        assert advice(plans, 0.05, bound).startswith("nothing to recommend: ")


@pytest.mark.parametrize("value", ["-1", "0", "inf", "many"])
def test_overlap_that_is_none_is_refused(capsys, value):
    with pytest.raises(SystemExit) as caught:
        plan.main([*LOGNORMAL, "--overlaps", value])
    assert caught.value.code == 2
    assert f"error: argument --overlaps: {value}: above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group", "4"], "no lengths: give --run or --lognormal"),
        ([], "--group is missing: give it, or --run"),
        ([*LOGNORMAL, "--replicas", "2"], "no engine curve: give --run or --curve"),
        ([*LOGNORMAL, "--replicas", "2", "--curve", __file__], f"{__file__} is no engine curve"),
        (["--run", "/nowhere"], "/nowhere: no such directory"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_a_line(capsys, arguments, message):
    assert plan.main(arguments) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"error: {message}") and out.count("\n") == 1


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
    settings = settings_of(2, 2, slots_per_replica=8, resume_kv=ResumeKV.KEEP)
    made = {"PartialRolloutConfig.from_config": settings, "fit": EngineCurve(0.001, 0.0)}
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
