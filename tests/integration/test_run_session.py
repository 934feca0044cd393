"""Without verl, a trainer drives a run: every prompt is trained once, through a crash in the middle of a step."""

import pytest

from recipe.partial_rollout.config.choices import Placement
from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.waits import finished
from tests.integration.scripted_training import ScriptedTraining

STEPS = 6


@pytest.mark.parametrize("placement", list(Placement))
def test_every_prompt_is_trained_once_through_a_crash(placement, tmp_path):
    crashed = ScriptedTraining(tmp_path, placement, STEPS)
    crashed.train(3)
    # Of the next step there is a batch with the trainer, and no checkpoint.
    finished(crashed.driver.next_batch(4))
    crashed.kill()

    resumed = ScriptedTraining(tmp_path, placement, STEPS)
    assert resumed.session.resumed_step == 3
    resumed.train(STEPS)
    resumed.end()
    found, _ = audit(tmp_path)
    assert found.violations == [] and "complete" in found.end
