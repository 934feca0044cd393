"""Figures of a round, against rounds small enough to work out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.records.figures import bubble_fraction, bubble_of_ended
from recipe.partial_rollout.records.run_log import EngineCall, RolloutPhase, TrainedGroup
from recipe.partial_rollout.rollout.step_book import batch_metrics, length_metrics, phase_metrics
from recipe.partial_rollout.tools.run_record import dealt


def call(start, end, tokens=10):
    return EngineCall(0, start, end, tokens, 0)


def group(output, *versions, order=0):
    return TakenGroup(f"1/{order}", order, {}, tuple(output(4, version=v) for v in versions))


def metrics_of(groups, trained_at):
    return batch_metrics(groups, [TrainedGroup.of(group, trained_at) for group in groups], trained_at)


def test_tools_are_shown_where_there_are_any(output):
    def used(tool_s, untrained=0):
        answered = {"calls_replayed": 2, "calls_asked": 1, "untrained_tokens": untrained}
        timed = replace(output(4), metrics={"tool_calls": tool_s, "generate_sequences": 3.0, **answered}, num_turns=6)
        return metrics_of([TakenGroup("1/0", 0, {}, (timed, timed))], 5)

    assert not any(name.startswith("agent/") for name in used(0.0))
    assert used(0.0, untrained=7)["agent/untrained_tokens"] == used(1.0, untrained=7)["agent/untrained_tokens"] == 14
    shown = used(1.0)
    assert (shown["agent/turns"], shown["agent/tool_s"], shown["agent/tool_share"]) == (6, 1.0, 0.25)
    assert (shown["agent/calls_replayed"], shown["agent/calls_asked"]) == (4, 2)


def test_lengths_spread_over_the_batch_and_within_a_group(output):
    # Lengths 2, 4 and 10, 12: the group's sigma is 1 in both, the batch's that of the four.
    groups = [TakenGroup(f"1/{i}", i, {}, tuple(map(output, lengths))) for i, lengths in enumerate([(2, 4), (10, 12)])]
    shown = length_metrics([TrainedGroup.of(group, 5) for group in groups])
    assert shown == {"length/sigma_batch": pytest.approx(17**0.5), "length/sigma_group": pytest.approx(1)}


def test_samples_that_several_versions_made_are_counted_with_all_their_tokens(output):
    def of_versions(*versions):
        return replace(output(len(versions)), versions=np.array(versions, np.int32))

    three, one = of_versions(3, 4, 4), of_versions(4)
    shown = metrics_of([TakenGroup("1/0", 0, {}, (three, one)), TakenGroup("1/1", 1, {}, (one, one))], 4)
    assert (shown["staleness/mixed_samples"], shown["staleness/mixed_tokens"]) == (1 / 4, 3 / 6)
    # A sample that is old as a whole is not mixed.
    old = metrics_of([TakenGroup("1/0", 0, {}, (one, one))], 9)
    assert (old["staleness/mixed_samples"], old["staleness/mixed_tokens"]) == (0, 0)


def test_share_found_in_the_cache_is_of_what_later_turns_read_again():
    def share(*figures):
        calls = (
            structs.replace(call(0.0, 1.0), resumed_tokens=lost, earlier_tokens=earlier) for lost, earlier in figures
        )
        return phase_metrics(RolloutPhase(0.0, 1.0, tuple(calls)), 2).get("agent/kv_hit_share")

    # The second resumes an interrupted turn.
    assert share((20, 60), (500, 0), (0, 40)) == pytest.approx(0.8)
    assert share((500, 0)) is None


def test_bubble_of_a_rollout_that_goes_on_counts_calls_where_they_end():
    # One of two slots is busy from 0 to 25, the other from 12 to 18; each call is noted in the phase that saw it end.
    ends = ((), (call(12.0, 18.0),), (call(0.0, 25.0),))
    phases = [RolloutPhase(10.0 * at, 10.0 * at + 10, calls) for at, calls in enumerate(ends)]
    noted = [phase_metrics(phase, 2, goes_on=True)["rollout/bubble_fraction"] for phase in phases]
    assert noted == [1.0, pytest.approx(0.7), 0.0]
    # The last call hides what was empty in its own phase: the share is never below 0.
    assert bubble_fraction(dealt(phases), full=2) == pytest.approx(1 - 31 / 60)
    assert bubble_of_ended(RolloutPhase(0.0, 20.0, (call(0.0, 30.0),)), full=2) == pytest.approx(0.25)


def test_staleness_counts_from_the_first_generated_token(output):
    taken = group(output, 5, 3, order=7)
    metrics = metrics_of([taken], 5)
    assert metrics["staleness/max"] == 2 and metrics["staleness/mean"] == 1.0
    assert metrics["off_policy_token_fraction"] == pytest.approx(0.5)
    assert metrics_of([TakenGroup("0/0", 0, {}, (output(0),))], 9)["staleness/max"] == 0, "it has no token"
    record = TrainedGroup.of(taken, 5)
    assert (record.order, record.epoch) == (7, 1) and record.prompt.startswith("0-")
    assert record.staleness == [0, 2] and record.lengths == [4, 4]
    assert record.off_policy_tokens == 4 and record.tokens == 8
