"""Groups whose samples score alike are consumed without being trained, and replaced in the same round."""

import asyncio
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.config.choices import Mode, OnSampleError
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.messages import Report, RolloutFailedError
from recipe.partial_rollout.manager.policies import FailurePolicy, GroupFilter, MissingMetricError
from recipe.partial_rollout.rollout.step_book import StepBook
from tests.unit.shared import begin

ACC = GroupFilter("acc")


def numbers(*taken):
    return [group.uid for groups in taken for group in groups]


@pytest.fixture
def filtering(manager):
    """A manager that filters by ``acc``, in an open round; the source has more to offer."""

    def build(*, left=100, **sizes):
        m = manager(group_filter=ACC, **sizes)
        m.note_source(left)
        begin(m)
        return m

    return build


def end_groups(m, output, *uids):
    """Claim whatever can be, and end the groups ``uids`` with rewards alike."""
    m.claim("w0")
    for uid in uids:
        for index in range(2):
            m.finish(f"{uid}#{index}", output(reward=1.0))


def train(m):
    taken = m.take_batch(stop=True)
    m.acknowledge(group.uid for group in taken)
    return taken


def test_metric_decides_which_value_counts(output):
    penalised = [output(reward=1.0, info={"acc": 1.0}), output(reward=0.5, info={"acc": 1.0})]
    assert GroupFilter("acc").common_value(penalised) == 1.0
    assert GroupFilter("reward").common_value(penalised) is None


def test_metric_that_the_reward_lacks_is_named_with_those_it_has(output):
    with pytest.raises(MissingMetricError, match=r"metric=f1: the reward function returns no such value; one of .*acc"):
        GroupFilter("f1").common_value([output(), output()])
    with pytest.raises(MissingMetricError, match="metric=reward: a sample was not scored"):
        GroupFilter("reward").common_value([output(reward=None), output(reward=None)])


def test_masked_samples_have_no_say_and_failures_are_not_filtered_away(filtering, output):
    """A group with one sample to judge trains, so that what failed in it counts against ``max_masked_fraction``."""
    m = filtering(batch=2, n=2, failures=FailurePolicy(OnSampleError.MASK))
    m.claim("w0")
    m.finish("0/0#0", output())
    m.fail("0/0#1", "boom")
    for index in range(2):
        m.fail(f"0/1#{index}", "boom")
    assert m.counters.filtered_groups == 0 and m.round_complete()
    wide = filtering(batch=1, n=3, failures=FailurePolicy(OnSampleError.MASK))
    wide.claim("w0")
    wide.fail("0/0#2", "boom")
    for index in range(2):
        wide.finish(f"0/0#{index}", output())
    assert wide.counters.filtered_groups == 1


@pytest.mark.parametrize(("prompts", "left", "uids", "trained"), [(4, 0, "0123", "23"), (2, 1, "01", "1")])
def test_equal_groups_are_trained_where_the_data_has_no_other(filtering, output, prompts, left, uids, trained):
    """With one prompt left in the source and none in reserve, one group may go, not all."""
    m = filtering(batch=2, overlap=1.0 if left == 0 else 0.0, prompts=prompts, left=left)
    end_groups(m, output, *[f"0/{i}" for i in uids])
    assert (m.counters.filtered_groups, m.counters.spared_groups) == (len(uids) - len(trained), len(trained))
    if not left:
        assert numbers(train(m)) == [f"0/{i}" for i in trained] and m.groups.lost == 0


def test_length_bias_leaves_filtered_groups_out_on_both_sides(filtering, output):
    m = filtering(batch=1, overlap=2.0)
    m.claim("w0")
    for uid, length, rewards in (("0/0", 100, (1, 1)), ("0/2", 10, (0, 1))):
        for index, reward in enumerate(rewards):
            m.finish(f"{uid}#{index}", output(length, reward=float(reward)))
    train(m)
    assert "length/bias" not in m.metrics(), "as many in dispatch order: 0/1, which has no token yet"
    for index in range(2):
        m.finish(f"0/1#{index}", output(30, reward=float(index)))
    begin(m)
    train(m)
    assert m.metrics()["length/bias"] == 1


def test_step_warns_of_equal_groups_that_are_trained_all_the_same(capsys):
    context = SimpleNamespace(settings=SimpleNamespace(group_filter=ACC, batch_groups=1))
    book = StepBook(context, probe=None, overlap=None)
    for total in (2, 2, 3):
        assert book._filter_metrics(1, 9, {"filter/spared_total": total}) == {"filter/groups": 9, "filter/consumed": 10}
    assert [line.count("equal acc") for line in capsys.readouterr().out.splitlines()] == [1, 1]


async def test_missing_metric_ends_the_run_by_its_name(prompts, output):
    with pytest.raises(RolloutFailedError, match=r"algorithm\.filter_groups\.metric=f1"):
        admission = Admission(Mode.WINDOW, 1, 2, 0.0, 2, 2, 4)
        manager = ManagerActor(admission, Scheduling(), stall_s=30.0, group_filter=GroupFilter("f1"))
        await manager.register_worker("w0", 2)
        await manager.begin_version(0, prompts(2), 10)
        ends = [(grant.sample_id, output()) for grant in await manager.claim("w0")]
        await manager.report(Report("w0", finished=ends))
        await asyncio.wait_for(manager.wait_batch(True), 5)
