"""Groups whose samples score alike are consumed without being trained, and replaced in the same round."""

import pytest

from recipe.partial_rollout.config.settings import FailureLimits, FilterSettings
from recipe.partial_rollout.manager.policies import common_value, missing
from tests.unit.shared import begin

ACC = FilterSettings("acc")
MASK = FailureLimits(sample_retries=0)


@pytest.mark.parametrize(("info", "said"), [({}, "nothing"), ({"acc": None}, "None"), ({"acc": "yes"}, "'yes'")])
def test_reward_without_the_metric_is_named_and_its_group_is_not_judged(output, info, said):
    assert f"filter_groups.metric=acc: the reward function gives {said}; numbers are" in missing("acc", 1.0, info)
    assert common_value("acc", [output(info=info), output(info=info)]) is None


def test_masked_samples_have_no_say_and_failures_are_not_filtered_away(manager, output):
    """A group with one sample to judge trains, so that what failed in it counts against ``max_masked_fraction``."""

    def filtered(group_size, failing):
        m = manager(batch=1, n=group_size, prompts=9, failures=MASK, group_filter=ACC)
        begin(m)
        for i, grant in enumerate(m.claim("w0")[:group_size]):
            if i < failing:
                m.fail(grant.sample_id, "boom")
            else:
                m.finish(grant.sample_id, output())
        return m.counters.filtered_groups

    assert [filtered(2, 1), filtered(2, 2), filtered(3, 1)] == [0, 0, 1]


@pytest.mark.parametrize(("prompts", "left", "ended", "spared"), [(4, 0, 4, 2), (2, 1, 2, 1)])
def test_equal_groups_are_trained_where_the_data_has_no_other(manager, output, prompts, left, ended, spared):
    """With one prompt left in the source and none in reserve, one group may go, not all."""
    m = manager(batch=2, prompts=prompts, group_filter=ACC)
    m.reserve.offer([], left)
    begin(m)
    for grant in m.claim("w0")[: 2 * ended]:
        m.finish(grant.sample_id, output())
    assert (m.counters.filtered_groups, m.counters.spared_groups) == (ended - spared, spared)
    assert m.round_complete() is not bool(left)
