"""Reward calls of trained samples: taken from the batch, noted in the trace, and how much of them held nobody up."""

import dataclasses
import json

import pytest

from recipe.partial_rollout.manager.types import SCORING_BEGAN, SCORING_ENDED, TakenGroup
from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.records.rollout_phase import RolloutPhase
from recipe.partial_rollout.records.round import Round
from recipe.partial_rollout.records.run_record import load_run
from recipe.partial_rollout.records.run_settings import Arm, RunSettings
from recipe.partial_rollout.records.run_trace import RunTrace
from recipe.partial_rollout.rollout.scorings import Scorings, scorings_of
from recipe.partial_rollout.tools.report.summary import summarize


def call(start, end):
    return EngineCall("a", start, end, 10, 0)


def scored(sample, *span):
    return dataclasses.replace(sample, metrics=dict(zip((SCORING_BEGAN, SCORING_ENDED), span, strict=True)))


def test_samples_that_were_never_scored_have_no_reward_call(output):
    groups = [
        TakenGroup("0/0", 0, 0, {}, (scored(output(4), 1.0, 2.5), output(4))),
        TakenGroup("0/1", 1, 0, {}, (scored(output(4), 0.0, 9.0),)),
    ]
    assert scorings_of(groups) == ((1.0, 2.5), (0.0, 9.0))


def test_reward_call_holds_up_a_round_in_which_no_engine_runs_any_more():
    # The engines are quiet from 6 s on; the round ends at 10 s, when the last score comes.
    metrics = Scorings().observe(RolloutPhase(0.0, 10.0, (call(0.0, 6.0),)), [(2.0, 5.0), (5.0, 10.0)])
    assert metrics["rollout/scoring_s"] == 8.0 and metrics["rollout/scoring_overlap"] == pytest.approx(0.5)


def test_seconds_in_which_only_reward_calls_go_on_count_once():
    # Alone: from 7 s, when the engines have stopped for a second, to 10 s; two calls, the same seconds.
    spans = [(2.0, 5.0), (7.0, 10.0), (8.0, 10.0)]
    metrics = Scorings().observe(RolloutPhase(0.0, 10.0, (call(0.0, 6.0),)), spans)
    assert metrics["rollout/scoring_alone_s"] == pytest.approx(3.0)


def test_reward_call_that_goes_on_while_the_trainer_updates_holds_nobody_up():
    scorings = Scorings()
    scorings.observe(RolloutPhase(0.0, 10.0, (call(0.0, 10.0),)), [])
    # Rounds end at 10 and 30; the trainer updates from 10 to 20.
    metrics = scorings.observe(RolloutPhase(20.0, 30.0, (call(20.0, 30.0),)), [(9.0, 21.0)])
    assert metrics["rollout/scoring_overlap"] == 1.0


def test_under_separate_placement_only_the_wait_can_be_held_up():
    # The engines are quiet from 6 s on, but the trainer has its batch until 8 s.
    phase = RolloutPhase(0.0, 10.0, (call(0.0, 6.0),))
    assert Scorings().observe(phase, [(5.0, 10.0)], waited_s=2.0)["rollout/scoring_overlap"] == pytest.approx(0.6)


def test_batch_without_reward_calls_has_no_figures_of_them():
    assert Scorings().observe(RolloutPhase(0.0, 10.0, ()), []) == {}


def test_dashboard_and_report_give_the_same_overlap(tmp_path):
    facts = RunSettings(Arm.PR, "tiny", 1, 1, 1, 2, 4, "window", "bounded", "0", "0")
    phases = [RolloutPhase(20.0 * at, 20.0 * at + 10, (call(20.0 * at, 20.0 * at + 4 + at),)) for at in range(3)]
    spans = [((1.0, 9.0),), ((3.0, 23.0), (26.0, 30.0)), ((8.0, 9.5), (41.0, 49.0))]
    trace, scorings, shown = RunTrace(tmp_path, ["a"], facts), Scorings(), []
    with (tmp_path / "metrics.jsonl").open("w") as metrics:
        for step, (phase, found) in enumerate(zip(phases, spans, strict=True), start=1):
            trace.round(Round(step, step - 1, phase, [], scorings=found))
            shown.append(scorings.observe(phase, found))
            metrics.write(json.dumps({"step": step, "data": {"timing_s/step": 20.0, "timing_s/gen": 10.0}}) + "\n")
    run = load_run(tmp_path)
    assert [round_.scorings for round_ in run.rounds] == spans
    total = sum(figures["rollout/scoring_s"] for figures in shown)
    overlapped = sum(figures["rollout/scoring_s"] * figures["rollout/scoring_overlap"] for figures in shown)
    reported = summarize(run, None).scoring
    assert (reported.seconds, reported.overlap) == (pytest.approx(total), pytest.approx(overlapped / total))
    # The second and the third batch's calls share moments, which count once in the report.
    assert [figures["rollout/scoring_alone_s"] for figures in shown] == [5.0, 10.0, 4.5] and reported.alone == 13.0
