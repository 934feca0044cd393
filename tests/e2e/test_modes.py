"""Dynamic sampling in a real training, with weights that change.

On every commit ``tests/integration/test_modes.py`` runs both published modes on scripted engines.
"""

from pathlib import Path

import pytest

from recipe.partial_rollout.records.run_log import Round
from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.tools.reading.run_log import read_log

pytestmark = pytest.mark.nightly

DULL_REWARD = Path(__file__).with_name("dull_reward.py")
SMALL = (
    "data.train_batch_size=4",
    "data.train_max_samples=16",
    "trainer.total_training_steps=null",
    "data.max_response_length=300",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "data.val_max_samples=8",
    "trainer.test_freq=2",
)


def test_dapo_replaces_the_groups_that_score_alike_until_the_data_ends(train):
    """Every third prompt scores 0 in all its samples: some are filtered, and the epoch ends before its fourth batch."""
    run = train(
        *SMALL,
        "partial_rollout.mode=april",
        "partial_rollout.overlap=0.75",
        "algorithm=dapo",
        f"reward.custom_reward_function.path={DULL_REWARD}",
        "trainer.save_freq=5",
    )
    rounds = [event for event in read_log(run.directory, []) if isinstance(event, Round)]
    filtered = [group for round_ in rounds for group in round_.filtered]
    trained = [group.uid for round_ in rounds for group in round_.trained]
    assert filtered and {group.value for group in filtered} == {0.0}
    steps = len(run.steps)
    assert 0 < steps < 4 and len(trained) == 4 * steps and run.run["complete"]
    assert 16 - 4 < len(filtered) + len(trained) <= 16
    result, _ = audit(run.directory)
    assert result.violations == [] and result.exhausted and result.lost == 0
    assert all(step["critic/advantages/max"] > 0 for step in run.steps.values())
    assert (run.directory / f"global_step_{steps}" / "partial_rollout").is_dir()
    assert f"the data ends after step {steps} of 4" in (run.directory / "terminal.log").read_text()
