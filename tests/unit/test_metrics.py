"""Figures of a round, against rounds small enough to work out by hand, and what verl's validation gives a dashboard."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.records.metrics import (
    METRICS,
    SECTION,
    bubble_fraction,
    bubble_of_ended,
    overview,
    running_curve,
    spread,
)
from recipe.partial_rollout.records.run_log import EngineCall, RolloutPhase, TrainedGroup
from recipe.partial_rollout.rollout.recorder import batch_metrics, phase_metrics
from recipe.partial_rollout.tools.reading.columns import CallColumns


def call(start, end, tokens=10, *, replica=0, queued_s=0.0, **more):
    return EngineCall(replica, start, end, tokens, 0, queued_s=queued_s, **more)


def taken(*outputs, order=0):
    return TakenGroup(f"1/{order}", order, {}, outputs)


def metrics_of(trained_at, *groups):
    return batch_metrics(groups, [TrainedGroup.of(group, trained_at) for group in groups], trained_at)


def test_samples_of_several_versions_are_counted_with_all_their_tokens(output):
    def of_versions(*versions):
        return replace(output(len(versions)), versions=np.array(versions, np.int32))

    three, one = of_versions(3, 4, 4), of_versions(4)
    shown = metrics_of(4, taken(three, one), taken(one, one, order=1))
    assert (shown["staleness/mixed_samples"], shown["staleness/mixed_tokens"]) == (1 / 4, 3 / 6)
    # A sample that is old as a whole is not mixed.
    old = metrics_of(9, taken(one, one))
    assert (old["staleness/mixed_samples"], old["staleness/mixed_tokens"]) == (0, 0)


def test_curve_has_a_row_for_each_replica_without_queued_calls_and_p95_is_a_value_that_occurs():
    aborted_in_the_queue = call(0, 4, tokens=0, queued_s=9.0)
    calls = call(-5, 4), call(0, 99, replica=1, queued_s=2.0), call(3, 3, replica=1), aborted_in_the_queue
    curve = running_curve(RolloutPhase(0.0, 10.0, calls), 2)
    assert curve.times.tolist() == [0, 2, 3, 4, 10]
    assert curve.running.tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0]]
    assert [spread(values).p95 for values in ([0] * 19 + [7], [0] * 18 + [3, 7], [4])] == [0, 3, 4] and not spread([])


def test_bubble_of_a_rollout_that_goes_on_counts_calls_where_they_end():
    # One of two slots is busy from 0 to 25, the other from 12 to 18; each call is noted in the phase that saw it end.
    ends = ((), (call(12.0, 18.0),), (call(0.0, 25.0),))
    phases = [RolloutPhase(10.0 * at, 10.0 * at + 10, calls) for at, calls in enumerate(ends)]
    noted = [phase_metrics(phase, 2, goes_on=True)["rollout/bubble_fraction"] for phase in phases]
    assert noted == [1.0, pytest.approx(0.7), 0.0], "never below 0"
    calls = CallColumns.joined(ends)
    parts = [structs.replace(phase, calls=calls.within(phase.start, phase.end)) for phase in phases]
    assert bubble_fraction(parts, full=2) == pytest.approx(1 - 31 / 60)
    assert bubble_of_ended(RolloutPhase(0.0, 20.0, (call(0.0, 40.0, queued_s=10.0),)), full=2) == pytest.approx(0.25)


def test_staleness_counts_from_the_first_generated_token(output):
    group = taken(output(4, version=5), output(4, version=3), order=7)
    metrics = metrics_of(5, group)
    assert metrics["staleness/max"] == 2 and metrics["staleness/mean"] == 1.0
    assert metrics["off_policy_token_fraction"] == pytest.approx(0.5)
    assert metrics_of(9, taken(output(0)))["staleness/max"] == 0, "it has no token"
    record = TrainedGroup.of(group, 5)
    assert (record.order, record.epoch, record.staleness, record.lengths) == (7, 1, [0, 2], [4, 4])
    assert record.off_policy_tokens == 4 and record.tokens == 8 and record.prompt.startswith("0-")


# -- a dashboard ---------------------------------------------------------------------------------------------------------


KEYS = [f"{SECTION}/{metric}" for metric in METRICS]
STEP = {
    "training/global_step": 3, "timing_s/step": 9.0, "timing_s/gen": 4.0, "val-core/gsm8k/acc/mean@4": 0.5,
    "critic/score/mean": 0.4, "rollout_corr/k3_kl": 1e-5, "partial_rollout/rollout/bubble_fraction": 0.2,
    "partial_rollout/rollout/tokens_per_s": 100.0,
}  # fmt: skip
PR_ONLY = {"staleness/mean": 0.7, "staleness/max": 2, "off_policy_token_fraction": 0.3, "length/bias": 0.9}


def test_both_arms_log_the_figures_under_the_same_keys():
    nopr = overview(STEP, partial=False)
    pr = overview(STEP | {f"partial_rollout/{name}": value for name, value in PR_ONLY.items()}, partial=True)
    assert list(nopr) == list(pr) == KEYS
    assert [[figures[key] for key in KEYS[-4:]] for figures in (nopr, pr)] == [[0, 0, 0, 1], [0.7, 2, 0.3, 0.9]]
    validation = {"val-core/gsm8k/acc/mean@4": 0.8, "val-core/gsm8k/acc/best@4/mean": 1.0}
    assert overview(validation, partial=False) == {f"{SECTION}/held_out_reward": 0.8}
