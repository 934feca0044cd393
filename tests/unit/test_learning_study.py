"""The learning study over runs whose figures can be worked out by hand."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.studies.learning.arms import ARMS, at_rates
from tests.studies.learning.campaign import Campaign
from tests.studies.learning.delayed_weights import delay
from tests.studies.learning.document import falls_table
from tests.studies.learning.figures import Gap, compare
from tests.studies.learning.published import estimators_table, staleness_table, write_published
from tests.studies.learning.run import SERIES, LearningRun
from tests.studies.processes import WarmProcess, run_fresh
from tests.studies.runner import Study
from tests.unit.runs import write_training

STEPS = 6


def build_run(
    held_out=(0.5, 0.6, 0.9, 0.92, 0.91, 0.95), *, arm="noPR", rate=3e-4, start=0, seed=1, step_s=2.0, **series
):
    """A run validated after every step, of two seconds each."""
    steps = len(held_out)
    known = {"rollout_s": (1.0,) * steps, "step_s": (step_s,) * steps, "length": (100.0,) * steps, **series}
    known = dict.fromkeys(SERIES, ()) | known
    return LearningRun(arm, rate, start, seed, (), "task", "abc", tuple(range(1, steps + 1)), tuple(held_out), known)


def logged(step, held_out):
    """What a step logs."""
    return {
        "timing_s/gen": 1.0,
        "timing_s/step": 2.0,
        "response_length/mean": 10.0 * step,
        "critic/score/mean": 0.5,
        "partial_rollout/staleness/mean": 1.0,
        "partial_rollout/staleness/max": step,
        **({} if held_out is None else {"val-core/clock10/reward/mean@8": held_out}),
    }


@pytest.fixture
def trainings(monkeypatch):
    """Commands that the campaign would have run; each training writes its metrics instead."""
    ran = []

    def train(command, **_):
        ran.append(command)
        if "recipe.partial_rollout.main_ppo" in command:
            found = next(word for word in command if word.startswith("trainer.default_local_dir="))
            validated = {2: 0.8, 4: 0.9, 6: 0.95}
            steps = [logged(step, validated.get(step)) for step in range(1, STEPS + 1)]
            write_training(Path(found.partition("=")[2]), *steps)
        return subprocess.CompletedProcess(command, 0, stdout="abc\n")

    monkeypatch.setattr(subprocess, "run", train)
    monkeypatch.setattr(WarmProcess, "run", lambda self, command, directory: run_fresh(command, directory))
    return ran


def test_delayed_engines_get_the_weights_of_some_versions_before_at_first_those_of_the_start():
    class Engine:
        weight = torch.zeros(1)

        def get_per_tensor_param(self):
            return iter([("w", self.weight)]), None

    delay(Engine, 2)
    engine, sent = Engine(), []
    for _ in range(5):
        sent.append(dict(engine.get_per_tensor_param()[0])["w"].item())
        engine.weight += 1
    assert sent == [0, 0, 0, 1, 2]


def test_a_run_in_the_ledger_is_read_from_its_metrics_and_not_trained_again(tmp_path, trainings):
    study = Study(tmp_path, at_rates(("noPR",), (3e-4,)), (1,), STEPS, "quickstart_cpu")
    campaign = Campaign(study, (0,), tmp_path / "runs.jsonl")
    assert campaign.run_missing() == 1
    trained = len(trainings)
    assert campaign.missing() == [] and campaign.run_missing() == 0 and len(trainings) == trained
    (run,) = campaign.runs()
    assert run.final == pytest.approx(0.8833, abs=1e-4)
    assert (run.validated_at, run.held_out) == ((2, 4, 6), (0.8, 0.9, 0.95))
    assert (run.staleness_mean, run.staleness_max, run.series["k3_kl"]) == (1.0, 6, ())


def test_figures_of_a_run_are_means_of_three_validations():
    run = build_run((0.1, 0.2, 0.3, 0.6, 0.9))
    assert run.final == pytest.approx(0.6), "the last three"
    assert build_run((0.5, 0.9, 0.9, 0.9, 0.6, 0.6)).fall == pytest.approx(0.2), "from the best three"
    assert build_run((0.1, 0.2, 0.3, 0.4)).fall == 0
    k3 = (0.001,) * 5 + (0.02,)
    fallen = build_run((0.5, 0.9, 0.9, 0.9, 0.6, 0.6), k3_kl=k3)
    assert (fallen.falls_at, fallen.warned_at, fallen.ess_at_warning) == (5, 6, None)
    assert build_run(fallen.held_out, k3_kl=k3, ess=(1.0,) * 5 + (0.9,)).ess_at_warning == 0.9
    dip = build_run((0.5, 0.9, 0.8, 0.9, 0.9, 0.9))
    assert (dip.falls_at, dip.warned_at) == (None, None), "one low validation is not a fall"
    assert build_run((0.5, 0.95, 0.8, 0.9, 0.91, 0.7)).seconds_to(0.9) == 4.0, "twice in a row"


def test_falls_of_the_recipe_are_counted_by_region_and_schedule_over_arms_and_lengths():
    mask = ("partial_rollout.trust_region=mask",)
    decay = (*mask, "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine")
    falling, holding = (0.9,) * 6 + (0.6,) * 3, (0.9,) * 6
    warning = (0.001,) * 5 + (0.02,)
    runs = [
        replace(build_run(falling), overrides=mask),
        replace(build_run(falling, arm="PR_eta_8_mask", k3_kl=(*warning, 0, 0, 0)), overrides=mask),
        replace(build_run(holding, arm="PR_mask", k3_kl=warning), overrides=mask),
        replace(build_run(holding, arm="PR_mask_decay"), overrides=decay),
    ]
    assert falls_table(runs).rows == [
        ["0.0003", "mask", "constant", "1 of 2", "1 of 1; 1 of 1", "1"],
        ["0.0003", "mask", "cosine", "0 of 1", "0 of 0; 0 of 1", "0"],
    ]


def test_areals_table_has_a_row_an_eta_and_says_what_has_not_run():
    held, fell = (0.9,) * 6, (0.9,) * 3 + (0.3,) * 3
    runs = [build_run(held, seed=seed) for seed in (1, 2)]
    runs += [build_run(held, arm="PR_eta_4", step_s=1.0), build_run(held, arm="PR_eta_4_wait")]
    runs += [build_run(fell, arm="PR_eta_8_uncorrected", seed=seed) for seed in (1, 2)]
    # As runs are called whose update gives the proximal policy; other rates are other tables.
    runs += [build_run(held, arm="PR_eta_2_mask_update"), build_run(fell, arm="PR_eta_2_mask", rate=1e-4)]
    rows = {row[0]: row[1:] for row in staleness_table(runs).rows}
    assert [*rows] == ["0 (noPR)", "1", "2", "4", "8", "16", "unbounded", "4, without interruption"]
    none = ["not run", "", ""]
    assert rows["4"] == ["+0.000", "0 of 1", "0.50", *none, *none]
    assert rows["8"] == [*none, "-0.600 ± 0.000", "2 of 2", "1.00", *none]
    assert rows["2"] == [*none, *none, "+0.000", "0 of 1", "1.00"]
    assert rows["16"] == none * 3 and rows["4, without interruption"][:3] == ["+0.000", "0 of 1", "1.00"]


def test_estimators_are_compared_with_their_own_nopr(tmp_path):
    runs = [build_run((0.9,) * 6), build_run((0.5,) * 6, arm="noPR_rloo"), build_run((0.6,) * 6, arm="PR_rloo")]
    runs += [build_run((0.5,) * 6, arm="noPR_opo"), build_run((0.48,) * 6, arm="PR_opo")]
    rows = {row[0]: row[1:] for row in estimators_table(runs).rows}
    assert rows["RLOO"] == ["0.500", "0.600", "+0.100", "above", "0 of 1"]
    assert rows["OPO"] == ["0.500", "0.480", "-0.020", "within noise", "0 of 1"]
    assert rows["GSPO"] == ["not run", "", "", "", ""]
    # The page names the arms that would fill it.
    write_published(runs, tmp_path, "the command")
    text = (tmp_path / "staleness.md").read_text()
    asked = {word for line in text.splitlines() if "--arms" in line for word in line.partition("--arms ")[2].split()}
    assert asked <= ARMS.keys() and {"PR_eta_16", "noPR_gspo", "PR_gspo"} <= asked


def test_arms_are_compared_within_pairs():
    rising = (0.5, 0.9, 0.9, 0.9)
    runs = [
        build_run(rising, seed=1),
        build_run(rising, arm="PR_overtake_0_3", seed=1, rollout_s=(0.5,) * 4, step_s=1.0),
        build_run((0.9, 0.6, 0.6, 0.6), seed=2),
        build_run((0.9, 0.7, 0.7, 0.7), arm="PR_overtake_0_3", seed=2, rollout_s=(0.4,) * 4),
        build_run(rising, arm="PR_overtake_0_3", seed=3),
        build_run(rising * 2, arm="PR_overtake_0_3", seed=1),
    ]
    base, ours = compare(runs)
    assert (base.arm, base.held, ours.held) == ("noPR", "1 of 2", "2 of 3"), "a run without a pair, no longer run"
    assert [run.seed for run in ours.runs] == [1, 2]
    assert ours.gap(lambda run: run.final) == Gap(pytest.approx(0.05), pytest.approx(0.05))
    assert ours.ratio(lambda run: run.rollout_per_token) == pytest.approx(0.45)
    assert ours.ratio(lambda run: run.step_per_token) == pytest.approx(0.75)
    late = (0.5, 0.5, 0.5, 0.9, 0.9)
    _, ours = compare([build_run(late), build_run(late, arm="PR_overtake_0_3", step_s=1.0)])
    assert ours.time_ratios(lambda base: 0.9) == [0.5]
    assert ours.time_ratios(lambda base: base.final + 1) == [], "neither reaches it"
