"""The learning study over runs whose figures can be worked out by hand."""

import json
import subprocess
from pathlib import Path

import pytest

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.preflight.placement_check import check_placement
from recipe.partial_rollout.records.jsonl import Fields
from tests.studies.learning.arms import COMMON, LR, at_rates
from tests.studies.learning.campaign import Campaign
from tests.studies.learning.document import report
from tests.studies.learning.eta import ETA_ARMS
from tests.studies.learning.figures import Gap, compare
from tests.studies.learning.run import LearningRun, read_run
from tests.studies.runner import Study, StudyError

STEPS = 6


def build_run(
    held_out=(0.5, 0.6, 0.9, 0.92, 0.91, 0.95), *, arm="noPR", rate=3e-4, start=0, seed=1, step_s=2.0, **series
):
    """A run validated after every step, of two seconds each."""
    steps = len(held_out)
    known = {"rollout_s": (1.0,) * steps, "step_s": (step_s,) * steps, "length": (100.0,) * steps, **series}
    names = ("reward", "staleness", "staleness_max", "kl", "k3_kl", "grad_norm")
    return LearningRun(
        arm,
        rate,
        start,
        seed,
        (),
        "task",
        "abc",
        tuple(range(1, steps + 1)),
        tuple(held_out),
        dict.fromkeys(names, ()) | known,
    )


def write_metrics(directory, rewards, *, steps=STEPS):
    """``metrics.jsonl`` of a run with a validation after every second step."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(1, steps + 1):
        values = {
            "training/global_step": step,
            "timing_s/gen": 1.0,
            "timing_s/step": 2.0,
            "response_length/mean": 10.0 * step,
            "critic/score/mean": 0.5,
            "partial_rollout/staleness/mean": 1.0,
            "partial_rollout/staleness/max": step,
        }
        if step % 2 == 0:
            values["val-core/clock10/reward/mean@8"] = rewards[step // 2 - 1]
        lines.append({"step": step, "data": values})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "run.json").write_text(json.dumps({"complete": True}))


def build_campaign(out, *, arms=("noPR",), starts=(0,), seeds=(1,), rates=(3e-4,)):
    study = Study(out, at_rates(arms, rates), seeds, STEPS, "quickstart_cpu")
    return Campaign(study, starts, out / "runs.jsonl")


@pytest.fixture
def trainings(monkeypatch):
    """Commands that the campaign would have run; each training writes its metrics instead."""
    ran = []

    def train(command, **_):
        ran.append(command)
        if "recipe.partial_rollout.main_ppo" in command:
            found = next(word for word in command if word.startswith("trainer.default_local_dir="))
            write_metrics(Path(found.partition("=")[2]), (0.8, 0.9, 0.95))
        return subprocess.CompletedProcess(command, 0, stdout="abc\n")

    monkeypatch.setattr(subprocess, "run", train)
    return ran


def test_every_arm_is_trained_at_every_rate():
    arms = at_rates(["noPR", "PR_bounded_1.5"], [1e-4, 3e-4])

    assert [arm.name for arm in arms] == [
        "noPR@0.0001",
        "noPR@0.0003",
        "PR_bounded_1.5@0.0001",
        "PR_bounded_1.5@0.0003",
    ]
    assert f"{LR}=0.0003" in arms[3].overrides


def test_eta_is_window_and_bound_of_separate_placement(composed_config):
    etas = set()
    for arm in ETA_ARMS:
        config = composed_config("quickstart_cpu", *COMMON, *arm.overrides)
        ours = config.partial_rollout
        assert ours.overlap == ours.max_staleness and ours.placement == "separate", arm.name
        assert ours.correction == ("none" if arm.name.endswith("_uncorrected") else "decoupled"), arm.name
        check_placement(config, PartialRolloutConfig.from_config(config))
        assert ours.trust_region == ("mask" if arm.name.endswith("_mask") else "none"), arm.name
        etas.add((int(ours.overlap), ours.correction, ours.trust_region))
    assert len(etas) == len(ETA_ARMS) == 15 and {eta for eta, *_ in etas} == {0, 1, 2, 4, 8}


def test_final_reward_is_the_mean_of_the_last_three_validations():
    run = build_run((0.1, 0.2, 0.3, 0.6, 0.9))

    assert run.final == pytest.approx(0.6)
    assert run.area == pytest.approx(0.42)


def test_a_fall_is_measured_from_the_best_three_validations():
    assert build_run((0.5, 0.9, 0.9, 0.9, 0.6, 0.6)).fall == pytest.approx(0.2)
    assert build_run((0.1, 0.2, 0.3, 0.4)).fall == 0


def test_quality_is_reached_where_two_validations_in_a_row_reach_it():
    assert build_run((0.5, 0.95, 0.8, 0.9, 0.91, 0.7)).seconds_to(0.9) == 4.0


def test_a_run_survives_the_ledger():
    run = build_run(k3_kl=(0.125,) * 6)

    assert LearningRun.from_json(Fields("here", json.loads(json.dumps(run.to_json())))) == run


def test_a_run_is_read_from_its_metrics(tmp_path):
    write_metrics(tmp_path, (0.8, 0.9, 0.95))

    run = read_run(tmp_path, arm="PR", rate=3e-4, start=0, seed=1, overrides=(), task="task", commit="abc")

    assert run.validated_at == (2, 4, 6)
    assert run.held_out == (0.8, 0.9, 0.95)
    assert (run.staleness_mean, run.staleness_max) == (1.0, 6)
    assert run.series["k3_kl"] == ()


def test_a_run_in_the_ledger_is_not_trained_again(tmp_path, trainings):
    campaign = build_campaign(tmp_path)
    assert campaign.run_missing() == 1
    trained = len(trainings)

    assert campaign.missing() == []
    assert campaign.run_missing() == 0
    assert len(trainings) == trained


def test_the_ledger_counts_although_the_directories_are_gone(tmp_path, trainings):
    first = build_campaign(tmp_path / "there")
    first.run_missing()

    second = Campaign(build_campaign(tmp_path / "here").study, (0,), first.ledger)

    assert second.missing() == []
    assert [run.final for run in second.chosen()] == [pytest.approx(0.8833, abs=1e-4)]


def test_a_warm_start_that_fails_ends_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))

    with pytest.raises(StudyError, match="the warm start of seed 0 failed"):
        build_campaign(tmp_path).run_missing()


def test_arms_are_compared_within_pairs():
    rising = (0.5, 0.9, 0.9, 0.9)
    runs = [
        build_run(rising, seed=1),
        build_run(rising, arm="PR_in_order_3", seed=1, rollout_s=(0.5,) * 4, step_s=1.0),
        build_run((0.9, 0.6, 0.6, 0.6), seed=2),
        build_run((0.9, 0.7, 0.7, 0.7), arm="PR_in_order_3", seed=2, rollout_s=(0.4,) * 4),
        build_run(rising, arm="PR_in_order_3", seed=3),
    ]

    base, ours = compare(runs)

    assert (base.arm, base.held, ours.held) == ("noPR", 1, 1)
    assert [run.seed for run in ours.runs] == [1, 2]
    assert ours.gap(lambda run: run.final) == Gap(pytest.approx(0.05), pytest.approx(0.05))
    assert ours.ratio(lambda run: run.rollout_per_token) == pytest.approx(0.45)
    assert ours.ratio(lambda run: run.step_per_token) == pytest.approx(0.75)


def test_time_to_quality_is_compared_where_both_reach_it():
    late, early = (0.5, 0.5, 0.5, 0.9, 0.9), (0.5, 0.5, 0.9, 0.9, 0.9)
    runs = [
        build_run(late, seed=1),
        build_run(late, arm="PR_in_order_3", seed=1, step_s=1.0),
        build_run(late, seed=2),
        build_run(early, arm="PR_in_order_3", seed=2, step_s=1.0),
        build_run((0.5,) * 5, seed=3),
        build_run(early, arm="PR_in_order_3", seed=3, step_s=1.0),
    ]

    assert compare(runs)[1].time_ratio(lambda base: 0.9) == pytest.approx(0.375)
    assert compare(runs[:2])[1].time_ratio(lambda base: base.final + 1) is None


def test_the_report_has_every_arm_and_every_run(tmp_path):
    runs = [build_run(), build_run(arm="PR_in_order_3"), build_run(arm="PR_in_order_3", seed=2)]

    table = report(runs, tmp_path, "bash study.sh")

    text = (tmp_path / "runs.md").read_text()
    assert [row[0] for row in table.rows] == ["noPR", "PR, in_order, overlap 3"]
    assert text.count("PR, in_order, overlap 3") == 3
    assert "`bash study.sh`" in text and (tmp_path / "runs.png").stat().st_size > 5_000
