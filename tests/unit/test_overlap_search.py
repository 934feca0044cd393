"""``overlap=auto`` finds the window that a known engine and known lengths call for, a notch at a time."""

import itertools

import numpy as np
import pytest

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.engine_curve import Cluster, EngineCurve
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.rollout.overlap import OverlapControl, OverlapDecision
from recipe.partial_rollout.tools.lengths import lognormal

LENGTHS = lognormal(median=100, mean=160, cap=1600, samples_per_group=4)
STEPPED = EngineCurve(step_s=1e-2, sample_s=1e-5)
"""a step costs the same with few samples as with many: what is in flight comes for nothing"""
LINEAR = EngineCurve(step_s=1e-9, sample_s=1e-4)
"""a sample decodes as fast alone as in company: nothing is gained by more of them"""


def call(start, end, tokens):
    return EngineCall("r", start, end, tokens, 0)


def calls_of(curve):
    """Calls under two loads, as fast as ``curve`` says."""
    alone = call(0.0, 100 * curve.decode_s(1, 0), 100)
    return [alone, *[call(alone.end, alone.end + 100 * curve.decode_s(64, 0), 100)] * 64]


def build_control(*, overlap=1.0, max_staleness=4, batch=16, notch=0.25):
    admission = Admission(Mode.WINDOW, batch, 4, overlap, 2 * batch, 4 * batch, max_staleness)
    return OverlapControl(admission, Scheduling(), lambda curve: Cluster(curve, 1, 256), notch=notch, min_gain=0.03)


def decided(control, calls, lengths):
    """What the control makes of a round."""
    control.observe(calls, lengths)
    control._pending.result(timeout=60)
    return control.poll()


@pytest.mark.parametrize(("curve", "start", "least", "most"), [(STEPPED, 0.5, 1.0, 2.0), (LINEAR, 1.5, 0.0, 0.0)])
def test_window_grows_where_company_is_free_and_shrinks_where_it_buys_nothing_by_a_notch_a_round(
    curve, start, least, most
):
    control, rng = build_control(overlap=start, max_staleness=2), np.random.default_rng(0)
    overlaps = [start]
    for _ in range(7):
        decided(control, calls_of(curve), LENGTHS.groups[rng.integers(len(LENGTHS.groups), size=16)])
        overlaps.append(control.overlap)
    assert least <= overlaps[-1] <= most and min(overlaps) >= 0 and max(overlaps) <= 2
    assert all(abs(after - before) <= 0.25 for before, after in itertools.pairwise(overlaps))


@pytest.mark.parametrize(
    ("asked", "in_force"),
    [
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
        decided(control, [], [])
        seen.append(control.overlap)
    assert seen == in_force


def test_notch_is_a_group_at_least_and_gains_are_metrics():
    control = build_control(batch=2, notch=0.1)
    decision = decided(control, calls_of(STEPPED), LENGTHS.groups[:64])
    assert decision.overlap == 1.5
    assert control.metrics()["overlap_auto/target"] == 1.5
    assert control.metrics()["overlap_auto/gain_up"] == decision.gain_up > 0.03


@pytest.mark.parametrize("lengths", [[[10, 10, 10, 10]], [[1, 2, 3]]], ids=["no curve", "a forecast that fails"])
def test_calls_of_which_nothing_can_be_forecast_change_nothing(lengths):
    control = build_control()
    calls = [call(0.0, 1.0, 10)] if len(lengths[0]) == 4 else calls_of(STEPPED)
    assert control.poll() is None and decided(control, calls, lengths) is None
    assert control.overlap == 1.0 and control.metrics() == {"overlap_auto/target": 1.0}
