"""The published modes on the real driver, manager and workers in Ray, over replicas that follow an engine curve."""

import sys
from collections import Counter
from dataclasses import replace

import ray

from recipe.partial_rollout.config.settings import Placement
from recipe.partial_rollout.records.run_log import Round
from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.tools.reading.run_log import read_log
from tests.integration.scripted_training import BATCH, N, ScriptedTraining, Worker

# Ray's workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 6
PROMPTS = STEPS * BATCH


class ScoringWorker(Worker):
    """Scores the samples of a dull prompt 0, those of any other by their number in the group."""

    async def _trained(self, sample, row):
        output = await super()._trained(sample, row)
        return replace(output, reward_score=0.0 if row["dull"] else float(sample.id[-1]))


def play(run_dir, *overrides):
    """The rounds, the figures of the last step, and what the audit says of the training.

    Of each prompt one sample is far longer than the other; every third prompt scores alike.
    """
    data = [{"lengths": [20, 150 + 30 * i], "index": i, "dull": i % 3 == 0} for i in range(PROMPTS)]
    ours = ("partial_rollout.max_staleness=4", *overrides)
    training = ScriptedTraining(run_dir, Placement.COLOCATED, STEPS, *ours, data=data, worker=ScoringWorker)
    training.begin()
    figures = {}
    for step in range(1, STEPS + 1):
        if not training.exhausted:
            figures = training.step(step)
    training.end()
    rounds = [event for event in read_log(run_dir, []) if isinstance(event, Round)]
    result, _ = audit(run_dir)
    assert result.violations == [] and result.complete
    return rounds, figures, result


def test_ssim_refills_all_through_the_round_and_trains_every_prompt_once(tmp_path):
    rounds, figures, _ = play(tmp_path, "partial_rollout.mode=ssim", "partial_rollout.scheduling.policy=seed")
    assert Counter(group.uid for round_ in rounds for group in round_.trained) == {f"0/{i}": 1 for i in range(PROMPTS)}
    assert [len(round_.trained) for round_ in rounds] == [BATCH] * STEPS
    born = Counter(group.birth for round_ in rounds for group in round_.trained)
    assert born[0] > BATCH, "groups that started in mid-round"
    assert 1 <= max(age for round_ in rounds for group in round_.trained for age in group.staleness) <= 4
    assert figures["lost_samples"] == figures["inflight/samples"] == 0
    assert figures["buffer/interrupted_total"] > 0


def test_april_replaces_the_groups_that_score_alike_until_the_data_ends(tmp_path):
    """Every third prompt scores 0 in all its samples: they are filtered, and the epoch ends before its last batch."""
    filters = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_reward")
    rounds, figures, result = play(tmp_path, "partial_rollout.mode=april", *filters)
    groups = [group for round_ in rounds for group in round_.filtered]
    uids = Counter(group.uid for round_ in rounds for group in (*round_.trained, *round_.filtered))
    assert set(uids.values()) == {1} and PROMPTS - BATCH < len(uids) <= PROMPTS and result.exhausted
    assert groups and {group.value for group in groups} == {0.0}
    assert all(len(group.lengths) == N for group in groups)
    born = Counter(group.birth for round_ in rounds for group in (*round_.trained, *round_.filtered))
    assert born[0] > BATCH
    assert 0 < len(rounds) < STEPS and {len(round_.trained) for round_ in rounds} == {BATCH}
    # Those that nothing could replace any more.
    dull = sum(int(group.uid[2:]) % 3 == 0 for round_ in rounds for group in round_.trained)
    assert dull == figures["filter/spared_total"] < BATCH
    assert figures["filter/groups_total"] == len(groups) and figures["lost_samples"] == 0
