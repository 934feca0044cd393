"""The convergence study over runs whose figures can be worked out by hand."""

import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from recipe.partial_rollout.records.run_record import load_run
from recipe.partial_rollout.tools.study.command import main
from recipe.partial_rollout.tools.study.convergence.arms import KINDS, Bound, arms, bound_of
from recipe.partial_rollout.tools.study.convergence.curves import ArmCurve, curve_of, gap
from recipe.partial_rollout.tools.study.convergence.document import label, table
from recipe.partial_rollout.tools.study.runner import Study, StudyError

STEPS = 4


def write_run(directory, rewards, *, staleness=0, complete=True, arm="PR"):
    """A run of two groups a step with these mean rewards."""
    directory.mkdir(parents=True, exist_ok=True)
    run = {
        "arm": arm,
        "experiment": "tiny",
        "batch_groups": 2,
        "samples_per_group": 1,
        "replicas": 1,
        "slots_per_replica": 8,
        "max_staleness": 4,
        "mode": "window",
        "policy": "bounded",
        "verl": "0.9.1",
        "vllm": "0.0",
        "complete": complete,
    }
    group = {"prompt": "p", "epoch": 0, "lengths": [5], "staleness": [staleness], "segments": [1]}
    metrics, trace = [], []
    for step, reward in enumerate(rewards, 1):
        figures = {
            "training/global_step": step,
            "timing_s/step": 2.0,
            "timing_s/gen": 1.0,
            **({} if reward is None else {"val-core/clock10/reward/mean@4": reward}),
        }
        metrics.append({"step": step, "data": figures})
        trained = [{**group, "group": 2 * step + i, "tokens": 5, "off_policy_tokens": 0} for i in range(2)]
        trace.append(
            {
                "event": "round",
                "step": step,
                "version": step - 1,
                "start": float(step),
                "end": step + 1.0,
                "calls": [],
                "interrupt_s": None,
                "resume_s": None,
                "trained": trained,
                "carried_groups": 0,
                "lost_samples": 0,
            }
        )
    (directory / "run.json").write_text(json.dumps(run))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (directory / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trace))


def build_study(out, *, seeds=(1, 2), staleness=("4",), **options):
    return Study(
        out, tuple(arms([Bound.parse(text) for text in staleness])), tuple(seeds), STEPS, "convergence_cpu", **options
    )


def build_curve(name, rewards, *, staleness=0.0):
    rewards = np.array(rewards, dtype=float)
    return ArmCurve(name, len(rewards), 2 * np.arange(1, rewards.shape[1] + 1), rewards, staleness, 4)


def test_arms_are_the_baseline_and_both_losses_at_each_bound():
    names = [arm.name for arm in arms([Bound(1, 1), Bound(4, 4)])]
    assert names == ["noPR", "corrected_1", "uncorrected_1", "corrected_4", "uncorrected_4"]
    uncorrected = arms([Bound(4, 4)])[2].overrides
    assert "partial_rollout.correction=none" in uncorrected and "partial_rollout.overlap=4" in uncorrected
    assert [arm.name for arm in arms([Bound(4, 4)], ("corrected", "clipped"))][-1] == "clipped_4"


def test_every_arm_composes_and_passes_the_recipes_checks(tmp_path):
    from hydra import compose, initialize_config_dir

    from recipe.partial_rollout import main_ppo
    from recipe.partial_rollout.config.settings import PartialRolloutConfig
    from recipe.partial_rollout.training.correction_check import check_correction

    study = Study(tmp_path, tuple(arms([Bound(1, 1), Bound(8, 2)], KINDS)), (1,), STEPS, "convergence_cpu")
    for arm in study.arms:
        with initialize_config_dir(str(main_ppo.CONF_DIR), version_base=None):
            config = compose("convergence_cpu", overrides=study.command(arm, 1)[5:])
        settings = PartialRolloutConfig.from_config(config)
        if settings.enable:
            check_correction(config, settings)
        assert config.data.seed == config.actor_rollout_ref.rollout.seed == 1


def test_complete_run_is_not_run_again(tmp_path):
    study = build_study(tmp_path)
    corrected = study.arms[1]
    write_run(study.directory(corrected, 1), [0.0] * STEPS)
    write_run(study.directory(corrected, 2), [0.0] * (STEPS - 1))
    write_run(study.directory(study.arms[0], 1), [0.0] * STEPS, complete=False)
    missing = {(arm.name, seed) for arm, seed in study.missing()}
    assert ("corrected_4", 1) not in missing
    assert {("corrected_4", 2), ("noPR", 1), ("noPR", 2), ("uncorrected_4", 1)} < missing


def test_run_with_other_overrides_is_not_taken_for_one_of_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: SimpleNamespace(returncode=0))
    small = build_study(tmp_path, seeds=(1,), overrides=("data.train_batch_size=8",))
    assert small.run_missing() == 3
    arm = small.arms[1]
    write_run(small.directory(arm, 1), [0.0] * STEPS)
    assert small.is_complete(arm, 1)
    large = build_study(tmp_path, seeds=(1,), overrides=("data.train_batch_size=16",))
    with pytest.raises(
        StudyError, match=r"was run with data.train_batch_size=8, this study has data.train_batch_size=16"
    ):
        list(large.missing())
    # More of the same is no other study.
    longer = replace(small, steps=STEPS + 1)
    assert not longer.is_complete(arm, 1)


def test_override_of_the_user_gives_way_to_the_arms(tmp_path):
    study = build_study(tmp_path, overrides=("partial_rollout.max_staleness=2", "data.train_batch_size=8"))
    command = study.command(study.arms[1], 3)
    assert "data.train_batch_size=8" in command and "partial_rollout.max_staleness=4" in command
    assert "partial_rollout.max_staleness=2" not in command and "data.seed=3" in command


def test_gap_has_the_standard_error_of_the_difference():
    baseline = build_curve("noPR", [[0.0, 0.3, 0.4, 0.5], [0.0, 0.5, 0.6, 0.7]])
    corrected = build_curve("corrected_4", [[0.0, 0.5, 0.5, 0.5], [0.0, 0.7, 0.7, 0.7]])
    difference, error = gap(corrected, baseline)
    assert (difference, error) == (pytest.approx(0.1), pytest.approx(np.hypot(0.1, 0.1)))
    row = table([baseline, corrected]).rows[1]
    assert row[0] == "PR, corrected, max_staleness 4, overlap 4" and row[-2:] == ["+0.100 ± 0.141", "yes"]
    far = build_curve("uncorrected_4", [[0.0, 0.1, 0.1, 0.1], [0.0, 0.2, 0.2, 0.2]])
    assert table([baseline, far]).rows[1][-1] == "no"


def test_one_seed_has_no_verdict():
    baseline, corrected = build_curve("noPR", [[0.4, 0.4, 0.4]]), build_curve("corrected_4", [[0.5, 0.5, 0.5]])
    assert table([baseline, corrected]).rows[1][-2:] == ["+0.100", "one seed"]


def test_band_is_the_mean_and_the_error_over_seeds():
    mean, error = build_curve("noPR", [[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]]).band()
    assert mean.tolist() == pytest.approx([1.0, 2.0, 3.0])
    assert error.tolist() == pytest.approx([1.0] * 3)


def test_curve_is_of_validations_alone(tmp_path):
    write_run(tmp_path / "one", [None, 0.5, None, 0.75])
    curve = curve_of("noPR", [load_run(tmp_path / "one")])
    assert curve.groups.tolist() == [4, 8] and curve.rewards.tolist() == [[0.5, 0.75]]


def test_run_without_a_validation_is_refused(tmp_path):
    write_run(tmp_path / "one", [None] * STEPS)
    with pytest.raises(ValueError, match="has no validation"):
        curve_of("noPR", [load_run(tmp_path / "one")])


def test_document_is_written_from_complete_runs(tmp_path, capsys):
    study = build_study(tmp_path / "runs")
    for arm, top in zip(study.arms, (0.5, 0.5, 0.2), strict=True):
        for seed in study.seeds:
            rewards = np.linspace(0, top + 0.01 * seed, STEPS).tolist()
            name = "noPR" if arm.name == "noPR" else "PR"
            write_run(study.directory(arm, seed), rewards, staleness=2 * (name == "PR"), arm=name)
    options = ["--seeds", "1", "2", "--staleness", "4", "--steps", str(STEPS), "--report-only"]
    assert main(["convergence", "--out", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs"), *options]) == 0
    text = (tmp_path / "docs" / "convergence.md").read_text()
    assert (
        "| PR, corrected, max_staleness 4, overlap 4 | 2 | 2.00 (max 2) | 0.343 ± 0.003 | +0.000 ± 0.005 | yes |"
        in text
    )
    assert (
        "| PR, correction=none, max_staleness 4, overlap 4 | 2 | 2.00 (max 2) | 0.143 ± 0.003 | -0.200 ± 0.005 | no |"
        in text
    )
    assert (tmp_path / "docs" / "convergence.png").stat().st_size > 10_000
    assert "Final reward" in capsys.readouterr().out


def test_study_without_a_baseline_is_refused_in_one_line(tmp_path, capsys):
    assert main(["convergence", "--out", str(tmp_path), "--docs", str(tmp_path), "--report-only"]) == 2
    assert capsys.readouterr().err == f"error: no complete run of noPR in {tmp_path}\n"


def test_arm_is_named_in_words():
    assert label("noPR") == "noPR" and label("clipped_8:2") == "PR, behaviour clipping, max_staleness 8, overlap 2"


def test_bound_is_leant_on_wholly_unless_it_says_how_much():
    assert Bound.parse("8") == Bound(8, 8.0) and Bound.parse("8:0.5") == Bound(8, 0.5)
    assert [str(Bound.parse(text)) for text in ("8", "8:2", "8:0.5")] == ["8", "8:2", "8:0.5"]
    assert bound_of("corrected_8:2") == Bound(8, 2.0) and bound_of("noPR") is None
    with pytest.raises(ValueError, match="invalid literal"):
        Bound.parse("all")
