"""One definition each: dashboard and report give the same figure for the same calls and samples."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.records.figures import bubble_fraction, p95, running_curve, spread
from recipe.partial_rollout.records.run_log import EngineCall, RolloutPhase, Round, RunLog, TrainedGroup
from recipe.partial_rollout.rollout.session import RunSession, TrainingSteps
from recipe.partial_rollout.rollout.step_book import batch_metrics, phase_metrics
from recipe.partial_rollout.tools.report.summary import summarize
from recipe.partial_rollout.tools.run_record import load_run
from tests.unit.runs import pr_settings

FACTS = pr_settings(2, 2, 2, slots_per_replica=2, epoch_prompts=4, total=4)
FULL = 4


def call(start, end, *, replica="a", queued_s=0.0, tokens=10):
    return EngineCall(replica, start, end, tokens, 0, queued_s=queued_s)


def reported(directory, phases, groups=()):
    """The report's summary of a run with ``phases``, each of which trains ``groups`` at version 9."""
    log = RunLog(directory, FACTS, ["a", "b"])
    with (directory / "metrics.jsonl").open("w") as metrics:
        for step, phase in enumerate(phases, start=1):
            log.round(Round(step=step, phase=phase, trained=[TrainedGroup.of(group, 9) for group in groups]))
            data = {"timing_s/step": phase.seconds, "timing_s/gen": phase.seconds}
            metrics.write(json.dumps({"step": step, "data": data}) + "\n")
    return summarize(load_run(directory))


def random_phase():
    generator, start, calls = np.random.default_rng(1), 1000.0, []
    for _ in range(8):
        begin, length = start + generator.uniform(-1, 9), generator.exponential(3.0)
        queued = generator.choice([0.0, generator.uniform(0, 5)])
        calls.append(call(begin, begin + length, replica=str(generator.choice(["a", "b"])), queued_s=float(queued)))
    return RolloutPhase(start, start + 10.0, tuple(calls))


def test_dashboard_and_report_give_the_same_bubble_and_staleness(tmp_path, output):
    groups = [
        TakenGroup(f"0/{i}", i, {}, tuple(output(3, version=9 - age) for age in ages))
        for i, ages in enumerate([(0, 0), (1, 0), (0, 2), (5, 7)])
    ]
    phase = random_phase()
    summary = reported(tmp_path, [phase], groups)
    bubble = phase_metrics(phase, FULL)["rollout/bubble_fraction"]
    assert 0 < bubble < 1 and summary.bubble_fraction == pytest.approx(bubble, abs=1e-12)
    clock = np.arange(phase.start, phase.end, 1e-3) + 5e-4
    running = sum(((clock >= c.start + c.queued_s) & (clock < c.end)).astype(int) for c in phase.calls)
    assert bubble == pytest.approx(1 - np.minimum(running, FULL).mean() / FULL, abs=1e-3), "as a fine clock counts"
    shown = batch_metrics(groups, [TrainedGroup.of(group, 9) for group in groups], 9)
    assert summary.staleness is not None
    assert (summary.staleness.mean, summary.staleness.p95, summary.staleness.max) == (
        pytest.approx(shown["staleness/mean"]),
        shown["staleness/p95"],
        shown["staleness/max"],
    )


def test_request_that_the_engine_queues_takes_no_slot():
    # Two slots, 10 s: one call runs for 10 s, one waits for 6 s and runs for 4 s.
    phase = RolloutPhase(0.0, 10.0, (call(0, 10), call(0, 10, queued_s=6.0)))
    assert bubble_fraction([phase], 2) == pytest.approx(6 / 20)
    aborted = call(0, 4, queued_s=9.0, tokens=0)
    assert bubble_fraction([RolloutPhase(0.0, 10.0, (aborted,))], 1) == 1.0 and aborted.tokens_within(0.0, 10.0) == 0.0


def test_span_without_length_has_no_bubble():
    assert bubble_fraction([RolloutPhase(1.0, 1.0, ())], 1) is None
    assert phase_metrics(RolloutPhase(1.0, 1.0, ()), 1)["rollout/bubble_fraction"] == 0.0


def test_curve_has_a_row_for_each_replica():
    calls = call(-5, 4, replica=0), call(0, 99, replica=1, queued_s=2.0), call(3, 3, replica=1)
    curve = running_curve(RolloutPhase(0.0, 10.0, calls), 2)
    assert curve.times.tolist() == [0, 2, 3, 4, 10]
    assert curve.running.tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0]]


def test_p95_is_a_value_that_occurs():
    assert p95([0] * 19 + [7]) == 0 and p95([0] * 18 + [3, 7]) == 3
    assert p95([4]) == 4
    assert spread([]) is None and spread([1, 2]).p95 == 2


@pytest.mark.parametrize(
    ("overrides", "offered"),
    [([], 15), (["partial_rollout.drain=False"], 20), (["algorithm.filter_groups.enable=True"], 20)],
)
def test_prompts_are_offered_for_the_steps_that_train_them_unless_more_are_consumed_or_kept(
    composed_config, overrides, offered
):
    settings = PartialRolloutConfig.from_config(composed_config("quickstart_cpu", *overrides))
    session = RunSession(settings, SimpleNamespace(run_dir=None, resumed_step=0))
    session.steps = TrainingSteps(per_epoch=10, epochs=2, total=15)
    assert session.offered == offered


@pytest.mark.parametrize(("enable", "noted"), [(True, 1.5), (False, None)])
def test_log_notes_how_far_a_group_may_overtake(composed_config, enable, noted):
    overrides = (f"partial_rollout.enable={enable}", "partial_rollout.scheduling.overtake=1.5")
    settings = PartialRolloutConfig.from_config(composed_config("quickstart_cpu", *overrides))
    session = RunSession(settings, SimpleNamespace(run_dir=None, resumed_step=0))
    session.steps, session.control = TrainingSteps(6, 1, 6), [None]
    assert session.facts("tiny", "fsdp2").overtake == noted
