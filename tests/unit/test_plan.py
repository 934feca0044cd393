"""``plan``: what it recommends, prints and refuses."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.tools import plan
from recipe.partial_rollout.tools.plan_table import Option, advice
from tests.studies.replay import TOLERANCE
from tests.unit.runs import build_group, build_round, build_run, interrupted_run

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
    assert pr["round_s"] / nopr["round_s"] == pytest.approx(70 / 134, rel=TOLERANCE)
    assert pr["staleness_mean"] == pytest.approx(0.92, rel=TOLERANCE)


def forecast(speed):
    return SimpleNamespace(trained_tokens_per_s=speed, staleness_mean=speed / 10)


def options(*overlaps, policy="bounded"):
    """noPR and plans, each overlap a fifth faster than the one before."""
    return [Option("noPR", 0.0, None, forecast(10.0))] + [
        Option(policy, overlap, None, forecast(10.0 * 1.2**at)) for at, overlap in enumerate(overlaps, 1)
    ]


def test_only_what_learning_was_tested_with_is_recommended_and_at_its_price():
    said = advice(options(0.5, 1.0, 1.5, 3.0), 8)
    assert "partial_rollout.overlap=1.5 with scheduling.policy=bounded, max_staleness=8: rollout 1.73 x noPR" in said
    assert "the largest planned whose learning was tested" in said
    assert "It costs mean staleness 1.73: the reward comes about as many steps later" in said
    for plans, bound in ((options(2.0, 3.0), 8), (options(1.0, policy="seed"), 4), (options(1.0), 9)):
        assert advice(plans, bound).startswith("nothing to recommend: ")


@pytest.mark.parametrize("value", ["-1", "0", "inf", "many"])
def test_overlap_that_is_none_is_refused(capsys, value):
    with pytest.raises(SystemExit) as caught:
        plan.main([*LOGNORMAL, "--overlaps", value])
    assert caught.value.code == 2
    assert f"error: argument --overlaps: {value}: above 0" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["batch", "group", "replicas", "slots", "rounds"])
def test_size_that_is_none_is_refused(capsys, option):
    with pytest.raises(SystemExit) as caught:
        plan.main([*LOGNORMAL, f"--{option}=0"])
    assert caught.value.code == 2
    assert f"error: argument --{option}: 0: an integer of at least 1" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    "content", [b"partial_rollout: [1,", b"- 1", b"\xff\xfe\xfd", b"partial_rollout: {max_staleness: x}"]
)
def test_configuration_that_a_dying_process_left_torn_is_named(tmp_path, capsys, content):
    path = interrupted_run(tmp_path / "run")
    (path / "config.yaml").write_bytes(content)
    assert plan.main(["--run", str(path)]) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"error: {path}/config.yaml cannot be read (") and out.count("\n") == 1


def test_run_whose_samples_wait_for_tools_is_refused(tmp_path, capsys):
    calls = [(0, start, start + 2, 20, 0, 0, 10, 0.0, "0/0#0", False) for start in (0, 6)]
    path = build_run(
        tmp_path / "a", rounds=[build_round(1, start=0, end=10, calls=calls, trained=[build_group(0, [20])])]
    )
    assert plan.main(["--run", str(path)]) == 2
    assert "samples waited 4 s between turns and decoded 4 s; the simulation plays no tools" in capsys.readouterr().out
    # Of 30 conversations four wait 1 s: too little to matter.
    assert plan.main(["--run", str(interrupted_run(tmp_path / "b")), "--rounds", "4", "--overlaps", "1"]) == 0
