"""What a round made its engines wait for, and which batches are refused."""

import pytest

from recipe.partial_rollout.manager.failure_policy import masked_output
from recipe.partial_rollout.manager.messages import Flushed, RolloutFailedError, RoundEnd, RoundStart
from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.rollout.played_round import PlayedRound, check_batch


def build_round():
    return PlayedRound(
        3,
        RoundStart(2, 1),
        RoundEnd(20.0),
        began=9.0,
        opened_at=10.0,
        quiet_at=20.5,
        groups=[],
        flushing=[],
        flushed=0,
    )


def groups_of(outputs):
    return [TakenGroup(f"0/{i}", i, 0, {}, (output,), 0) for i, output in enumerate(outputs)]


def test_waits_are_from_opening_to_the_first_call_and_from_the_decision_to_the_last_report():
    calls = [EngineCall("r", 12.0, 19.0, 5, 0), EngineCall("r", 10.25, 20.5, 5, 0)]
    assert build_round().waits(Flushed(23.0, {}), calls) == {"resume_s": 0.25, "interrupt_s": 0.5, "collect_s": 2.5}


def test_round_without_calls_waited_for_none():
    waits = build_round().waits(Flushed(20.0, {}), [])
    assert waits["resume_s"] == waits["collect_s"] == 0.0


def test_batch_of_too_few_groups_is_refused(output):
    check_batch(groups_of([output(), output()]), 2, 0.25)
    with pytest.raises(RolloutFailedError, match="the data ran out with 1 groups ready; a batch needs 2"):
        check_batch(groups_of([output()]), 2, 0.25)


def test_batch_of_too_many_masked_samples_is_refused_with_an_error_of_theirs(output):
    masked = masked_output([], "ToolError: boom")
    check_batch(groups_of([output(), output(), masked]), 3, 0.5)
    with pytest.raises(
        RolloutFailedError, match=r"1 of the 3 samples.*max_masked_fraction=0\.25; one of them: ToolError"
    ):
        check_batch(groups_of([output(), output(), masked]), 3, 0.25)
