"""Groups and samples move along their states only: each verb, tried in every state that a random life can reach."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.partial_rollout.config.choices import SchedulingPolicy
from recipe.partial_rollout.manager.failure_policy import FailurePolicy
from recipe.partial_rollout.manager.groups import Groups
from recipe.partial_rollout.manager.samples import Samples
from recipe.partial_rollout.manager.slots import Slots
from recipe.partial_rollout.manager.types import GroupState, Prompt, SampleOutput, SampleState, Segment

EMPTY = np.empty(0, np.int32)
OUTPUT = SampleOutput(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, 0, 0.0, {}, 2, {})

GROUP_VERBS = {
    "start": (GroupState.WAITING, GroupState.ACTIVE, lambda groups, group: groups.start(group, 3)),
    "ready": (GroupState.ACTIVE, GroupState.READY, lambda groups, group: groups.ready(group)),
    "filter": (GroupState.ACTIVE, GroupState.FILTERED, lambda groups, group: groups.filter(group, 1.0)),
    "take": (GroupState.READY, GroupState.TAKEN, lambda groups, group: groups.take([group])),
    "train": (GroupState.TAKEN, GroupState.TRAINED, lambda groups, group: groups.train([group.uid])),
}
"""the state that each verb leaves, the one that it enters, and the call"""

SAMPLE_VERBS = {
    "interrupt": ({SampleState.RUNNING}, lambda samples, id: samples.interrupt(id)),
    "leave": ({SampleState.RUNNING}, lambda samples, id: samples.leave(id)),
    "finish": ({SampleState.RUNNING, SampleState.AWAY}, lambda samples, id: samples.finish(id, OUTPUT)),
    "fail": ({SampleState.RUNNING, SampleState.AWAY}, lambda samples, id: samples.fail(id, "boom")),
    "add_segment": ({SampleState.RUNNING}, lambda samples, id: samples.add_segment(id, Segment(EMPTY, EMPTY, 0))),
    "retry": ({SampleState.FAILED}, lambda samples, id: samples.retry(id)),
    "mask": ({SampleState.FAILED}, lambda samples, id: samples.mask(id)),
}
"""the states that each verb leaves, and the call"""


def picture(groups):
    """Everything that a verb could change, in plain values."""
    live = [(g.uid, g.state, g.birth, g.unfinished, g.finished_length) for g in groups.by_order.values()]
    queue, taken = [g.uid for g in groups.ready_queue], list(groups.taken)
    return (
        live,
        queue,
        taken,
        dict(groups.unfinished),
        replace(groups.counters),
        list(groups.admitted),
        list(groups.filtered),
    )


def one_group(samples=0):
    """A group whose samples, if any, have not ended, in an otherwise empty room."""
    groups = Groups()
    return groups, groups.enter(Prompt("0/0", 0, {}), samples)


@given(verbs=st.lists(st.sampled_from(list(GROUP_VERBS)), max_size=30))
def test_verb_of_a_group_passes_from_its_one_state_and_changes_nothing_from_another(verbs):
    groups, group = one_group()
    for verb in verbs:
        leaves, enters, call = GROUP_VERBS[verb]
        before, state = picture(groups), group.state
        if state is leaves:
            call(groups, group)
            assert group.state is enters and groups.lost == 0
        else:
            with pytest.raises(RuntimeError, match="group 0/0"):
                call(groups, group)
            assert group.state is state and picture(groups) == before


@pytest.mark.parametrize("verb", ["ready", "filter"])
def test_group_does_not_end_before_its_samples(verb):
    groups, group = one_group(samples=1)
    groups.start(group, 0)
    before = picture(groups)
    with pytest.raises(RuntimeError, match="0/0 has 1 unfinished samples"):
        GROUP_VERBS[verb][2](groups, group)
    assert picture(groups) == before


def test_sample_does_not_end_in_a_group_that_has_not_started_or_has_none_left():
    groups, group = one_group(samples=1)
    with pytest.raises(RuntimeError, match="0/0 is waiting: it has no sample that could end"):
        groups.end_sample(group, 5)
    groups.start(group, 0)
    groups.end_sample(group, 5)
    with pytest.raises(RuntimeError, match="0/0 is active: it has no sample that could end"):
        groups.end_sample(group, 5)


def test_restored_group_is_in_the_state_that_its_samples_tell():
    groups = Groups()
    restored = [one_group(samples=2)[1] for _ in range(3)]
    for order, (group, birth, ended) in enumerate(zip(restored, (4, None, 3), (2, 0, 1), strict=True)):
        group.order, group.birth = order, birth
        for sample in group.samples[:ended]:
            sample.output = OUTPUT
    groups.restore(restored)
    assert [group.state for group in restored] == [GroupState.READY, GroupState.WAITING, GroupState.ACTIVE]
    assert list(groups.ready_queue) == restored[:1] and dict(groups.unfinished) == {None: 1, 3: 1}


@given(verbs=st.lists(st.sampled_from(["claim", "claim", *SAMPLE_VERBS]), max_size=30))
def test_verb_of_a_sample_passes_from_its_states_and_changes_nothing_from_another(verbs):
    groups, group = one_group(samples=1)
    (sample,) = group.samples
    samples = Samples(groups, Slots(SchedulingPolicy.BOUNDED), FailurePolicy(), clock=lambda: 0.0)
    samples._slots.register("w0", 2)
    samples.enter(group)
    for verb in verbs:
        state, before = sample.state, (picture(groups), sample.worker, sample.failures)
        if verb == "claim":
            grants = samples.claim("w0", None, version=0, overdue=-9, beyond_share=False)
            claimable = state in (SampleState.WAITING, SampleState.INTERRUPTED)
            assert len(grants) == claimable and (sample.state is SampleState.RUNNING or not claimable)
        elif state in SAMPLE_VERBS[verb][0]:
            SAMPLE_VERBS[verb][1](samples, sample.id)
        else:
            with pytest.raises(RuntimeError, match=f"{verb}: sample 0/0#0 is"):
                SAMPLE_VERBS[verb][1](samples, sample.id)
            assert sample.state is state and (picture(groups), sample.worker, sample.failures) == before
