"""The study of quorums: what it forecasts of whole groups is what the planner says, and each sample trains once."""

import itertools
from collections import Counter

import numpy as np
import pytest

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.tools.planner.engine_curve import PRESETS, Cluster
from recipe.partial_rollout.tools.planner.lengths import LengthTrace
from recipe.partial_rollout.tools.planner.rounds import forecast
from tests.studies.quorum.estimators import ESTIMATORS, Record, baseline
from tests.studies.quorum.rounds import Batch, Job, play

CURVE = PRESETS["h20-qwen3-4b"]
LENGTHS = LengthTrace.lognormal(median=300, mean=360, cap=1838, samples_per_group=8, groups=512)


def played(quorum: int, overlap: float, batches: int, max_staleness: int = 4) -> list[Batch]:
    rng = np.random.default_rng(0)
    order = (int(rng.integers(512)) for _ in itertools.count())
    job = Job(16, 8, CURVE, replicas=4, max_staleness=max_staleness)
    return list(itertools.islice(play(job, LENGTHS.groups, quorum, overlap, order), batches))


@pytest.mark.parametrize("overlap", [0.5, 1.0])
def test_whole_groups_take_as_long_as_in_the_planner(overlap):
    settings = PartialRolloutConfig(batch_groups=16, samples_per_group=8, overlap=overlap, max_staleness=4)
    theirs = forecast(settings, Cluster(CURVE, 4, 64), LENGTHS, rounds=60)
    batches = played(8, overlap, 64)[4:]
    tokens = sum(int(batch.lengths.sum()) for batch in batches)
    assert tokens / sum(batch.seconds for batch in batches) == pytest.approx(theirs.trained_tokens_per_s, rel=0.05)
    assert np.concatenate([b.staleness for b in batches]).mean() == pytest.approx(theirs.staleness_mean, abs=0.03)


@pytest.mark.parametrize(("quorum", "max_staleness"), [(8, 2), (6, 2), (6, 1), (1, 2)])
def test_each_sample_trains_once_in_a_full_batch_of_ready_groups_within_the_bound(quorum, max_staleness):
    batches = played(quorum, 1.0, 40, max_staleness)
    once = Counter((share.group.order, i) for batch in batches for share in batch.shares for i in share.samples)
    assert set(once.values()) == {1}
    assert all(len(batch.lengths) == 128 and batch.staleness.max() <= max_staleness for batch in batches)
    shares = [share for batch in batches for share in batch.shares]
    assert all(len(share.ended) >= quorum and set(share.samples) <= set(share.ended) for share in shares)
    assert min(order for order, _ in once) == 0 and {i for order, i in once if order == 0} == set(range(8))


def test_advantages_are_those_of_the_whole_group_once_it_has_ended():
    rewards = np.random.default_rng(0).integers(2, size=LENGTHS.groups.shape).astype(float)
    record, batch = Record(np.random.default_rng(0)), played(8, 0.5, 1)[0]
    record.add(batch, rewards)
    share = batch.shares[0]
    stand_ins = record.stand_ins(share)
    for name, own in itertools.product(set(ESTIMATORS) - {"first", "history"}, (True, False)):
        found = [baseline(each, share, 3, 8, rewards, stand_ins, own=own) for each in (name, "whole")]
        assert found[0] == pytest.approx(found[1])
