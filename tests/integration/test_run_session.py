"""Without verl, a trainer drives a run: every prompt is trained once, through a crash in the middle of a step."""

import asyncio
from itertools import permutations

import pytest

from recipe.partial_rollout.config.settings import Placement
from recipe.partial_rollout.records.run_log import Round
from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.tools.reading.run_log import read_log
from tests.integration.scripted_training import BATCH, ScriptedTraining

STEPS = 6


@pytest.mark.parametrize("placement, then", list(permutations(Placement)))
def test_every_prompt_is_trained_once_through_a_crash_and_a_new_placement(placement, then, tmp_path):
    crashed = ScriptedTraining(tmp_path, placement, STEPS)
    crashed.train(3)
    # Of the next step there is a batch with the trainer, and no checkpoint.
    asyncio.run(crashed.driver.next_batch(4))
    crashed.kill()

    resumed = ScriptedTraining(tmp_path, then, STEPS)
    assert resumed.resumed_step == 3
    resumed.train(STEPS)
    resumed.end()
    found, _ = audit(tmp_path)
    assert found.violations == [] and found.complete


def test_separate_engines_train_the_baselines_batches_where_the_bound_is_0(tmp_path):
    bound = ("partial_rollout.overlap=0", "partial_rollout.max_staleness=0")
    training = ScriptedTraining(tmp_path, Placement.SEPARATE, STEPS, *bound)
    training.train(STEPS)
    training.end()
    batches = [event.trained for event in read_log(tmp_path, []) if isinstance(event, Round)]
    trained = [sorted(int(group.uid.removeprefix("0/")) for group in batch) for batch in batches]
    assert trained == [list(range(BATCH * step, BATCH * (step + 1))) for step in range(STEPS)]
