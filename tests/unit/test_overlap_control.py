"""``overlap=auto`` finds the window that a known engine and known lengths call for, a notch at a time."""

import itertools

import numpy as np
import pytest

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.engine_curve import Cluster, EngineCurve
from recipe.partial_rollout.planner.rounds import forecast
from recipe.partial_rollout.planner.samples import lognormal
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.rollout.overlap import OverlapControl, OverlapDecision

LENGTHS = lognormal(median=100, mean=160, cap=1600, samples_per_group=4)
STEPPED = EngineCurve(step_s=1e-2, sample_s=1e-5)
"""a step costs the same with few samples as with many: what is in flight comes for nothing"""
LINEAR = EngineCurve(step_s=1e-9, sample_s=1e-4)
"""a sample decodes as fast alone as in company: nothing is gained by more of them"""


def call(start, end, tokens):
    return EngineCall("r", start, end, tokens, 0)


def calls_of(curve):
    """Calls under two loads, as fast as ``curve`` says."""
    spans = [call(0.0, 100 * curve.decode_s(1, 0), 100)]
    start = spans[0].end
    return [*spans, *[call(start, start + 100 * curve.decode_s(64, 0), 100) for _ in range(64)]]


def build_control(*, overlap=1.0, max_staleness=4, min_gain=0.03):
    admission = Admission(Mode.WINDOW, 16, 4, overlap, 32, 64, max_staleness)
    return OverlapControl(admission, Scheduling(), lambda curve: Cluster(curve, 1, 256), notch=0.25, min_gain=min_gain)


def flush(control, curve, rounds=10):
    """Overlaps in force after each of ``rounds`` rounds."""
    rng, seen = np.random.default_rng(0), []
    for _ in range(rounds):
        control.observe(calls_of(curve), LENGTHS.groups[rng.integers(len(LENGTHS.groups), size=16)])
        control._pending.result(timeout=60)
        control.poll()
        seen.append(control.overlap)
    return seen


def test_window_grows_where_company_is_free_and_shrinks_where_it_buys_nothing():
    assert flush(build_control(overlap=0.5), STEPPED)[-1] >= 1.25
    assert flush(build_control(overlap=1.5), LINEAR)[-1] == 0.0


@pytest.mark.parametrize("curve", [STEPPED, LINEAR])
def test_no_round_changes_it_by_more_than_a_notch_or_leaves_its_limits(curve):
    overlaps = [1.0, *flush(build_control(max_staleness=2), curve)]
    assert all(abs(after - before) <= 0.25 for before, after in itertools.pairwise(overlaps))
    assert min(overlaps) >= 0 and max(overlaps) <= 2


def test_what_it_settles_on_has_most_of_the_speed_at_a_fraction_of_the_staleness():
    flushed = float(np.median(flush(build_control(overlap=0.5, max_staleness=8), STEPPED, rounds=12)[-4:]))
    at, beyond = (
        forecast(
            Admission(Mode.WINDOW, 16, 4, overlap, 32, 64, 8),
            Scheduling(),
            Cluster(STEPPED, 1, 256),
            LENGTHS,
            rounds=60,
        )
        for overlap in (flushed, 6.0)
    )
    assert at.trained_tokens_per_s > 0.75 * beyond.trained_tokens_per_s
    assert at.staleness_mean < 0.5 * beyond.staleness_mean


def test_greedier_threshold_keeps_less_in_flight():
    assert flush(build_control(min_gain=0.15), STEPPED)[-1] < flush(build_control(min_gain=0.02), STEPPED)[-1]


def test_calls_that_show_no_curve_change_nothing():
    control = build_control()
    control.observe([call(0.0, 1.0, 10)], [[10, 10, 10, 10]])
    control._pending.result(timeout=60)
    assert control.poll() is None and control.overlap == 1.0
    assert control.metrics() == {"overlap_auto/target": 1.0}


@pytest.mark.parametrize(
    ("asked", "in_force"),
    [
        ("+ + +", [1.25, 1.5, 1.75]),
        ("+ - + -", [1.25, 1.25, 1.5, 1.5]),
        ("+ - = - -", [1.25, 1.25, 1.25, 1.25, 1.0]),
        ("- + + + -", [0.75, 0.75, 1.0, 1.25, 1.25]),
    ],
)
def test_it_turns_back_only_when_two_measurements_in_a_row_say_so(asked, in_force):
    control, seen = build_control(), []
    for ask in asked.split():
        step = {"+": 0.25, "-": -0.25, "=": 0.0}[ask]
        control.decide = lambda rounds, step=step: OverlapDecision(control.overlap + step, 0.0, 0.0, "measured")
        control.observe([], [])
        control._pending.result(timeout=60)
        control.poll()
        seen.append(control.overlap)
    assert seen == in_force


def test_notch_is_a_group_at_least():
    admission = Admission(Mode.WINDOW, 2, 4, 1.0, 4, 8, 4)
    control = OverlapControl(admission, Scheduling(), lambda curve: Cluster(curve, 1, 256), notch=0.1, min_gain=0.01)
    control.observe(calls_of(STEPPED), LENGTHS.groups[:64])
    control._pending.result(timeout=60)
    assert control.poll().overlap == 1.5


def test_forecast_that_fails_changes_nothing_and_ends_nothing(caplog):
    control = build_control()
    control.observe(calls_of(STEPPED), [[1, 2, 3]])
    assert control._pending.result(timeout=60) is None
    assert control.poll() is None and control.overlap == 1.0


def test_decision_says_why_and_its_gains_are_metrics():
    control = build_control()
    assert control.poll() is None
    control.observe(calls_of(STEPPED), LENGTHS.groups[:64])
    control._pending.result(timeout=60)
    decision = control.poll()
    assert decision.overlap == 1.25 and "a notch more gains" in decision.reason and "at least 3.0%" in decision.reason
    figures = control.metrics()
    assert figures["overlap_auto/target"] == 1.25 and figures["overlap_auto/gain_up"] == decision.gain_up > 0.03
