"""A warning when the policy runs away from its samples, once, and none for the ups and downs of a run that is well."""

import json
from math import inf, nan

import pytest

from recipe.partial_rollout.tools.drift import main
from recipe.partial_rollout.training.policy_drift import KL, PolicyDrift


def steps_of_warnings(values):
    drift = PolicyDrift()
    return [step for step, kl in enumerate(values, 1) if drift.observe({KL: kl}, step)]


def test_run_that_is_well_is_left_alone():
    # Large while much is learnt, and a floor below which factors mean nothing.
    assert steps_of_warnings([0.0, 0.0002, 0.0009, 0.0007, 0.0002, 0.0001, 0.0001, 0.00001, 0.0019, 0.0005]) == []


def test_drift_is_told_when_it_sets_in_and_again_only_after_it_was_over():
    well = [0.0002] * 8
    assert steps_of_warnings([*well, 0.0085, 0.0157, 0.0387]) == [9]
    assert steps_of_warnings([*well, 0.0085, 0.0001, 0.0157]) == [9, 11]


def test_first_steps_and_runs_that_always_were_far_off_are_no_alarm():
    assert steps_of_warnings([0.02, 0.3, 0.02, 0.03, 0.02]) == []
    assert steps_of_warnings([0.02] * 10) == []


def test_warning_says_what_to_do():
    drift = PolicyDrift()
    for step in range(1, 7):
        assert drift.observe({KL: 0.0003}, step) is None
    assert drift.observe({"critic/score/mean": 0.5}, 7) is None
    warning = drift.observe({KL: 0.0085}, 8)
    assert warning is not None
    for words in ("step 8", "rollout_corr/k3_kl 0.0085, 0.00030 by the median", "optim.lr", "partial_rollout.overlap"):
        assert words in warning


@pytest.mark.parametrize(
    ("key", "value"),
    [(KL, nan), (KL, inf), ("actor/loss", nan), ("actor/grad_norm", inf), ("critic/vf_loss", -inf)],
)
@pytest.mark.parametrize("earlier", [0, 7])
def test_figure_that_is_not_finite_is_told_by_name_in_its_own_step(key, value, earlier):
    drift = PolicyDrift()
    assert not any(drift.observe({KL: 0.0005}, step) for step in range(earlier))
    warning = drift.observe({KL: 0.0005, "actor/entropy": 1.0, key: value}, earlier)
    assert warning is not None and f"step {earlier}" in warning and f"{key} {value}" in warning
    assert "actor/entropy" not in warning
    assert drift.observe({KL: 0.0005}, earlier + 1) is None


def test_nans_do_not_hide_a_later_drift():
    assert steps_of_warnings([0.0005, nan, 0.0006, 0.0005, nan, 0.0004, 0.0005, 0.0005, 0.5]) == [2, 5, 9]


def write_run(directory, steps):
    directory.mkdir()
    lines = [{"step": i, "data": {"training/global_step": i, **step}} for i, step in enumerate(steps, 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(directory)


def test_command_says_of_each_run_where_it_warned_and_how_it_ended(tmp_path, capsys):
    kl = [0.0002] * 8 + [0.0085, 0.0001, 0.0157]
    fell = write_run(tmp_path / "fell", [{KL: value, "critic/score/mean": i / 10} for i, value in enumerate(kl)])
    well = write_run(tmp_path / "well", [{KL: 0.0002, "critic/score/mean": 0.5, "val-core/x/mean@1": 0.875}] * 6)
    assert main([fell, well]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [fell, "11", "9", "11", "0.900"] in rows
    assert [well, "6", "-", "0.875"] in rows


def test_command_refuses_what_is_no_run_of_pr(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert main([write_run(tmp_path / "noPR", [{"critic/score/mean": 0.5}])]) == 2
    missing, uncorrected = capsys.readouterr().err.splitlines()
    assert "metrics.jsonl" in missing
    assert f"noPR: no step has {KL}" in uncorrected
