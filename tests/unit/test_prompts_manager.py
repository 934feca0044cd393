"""What the state machine does, as facts; ``test_manager_life`` has what always holds. N groups of n samples, one worker."""

import weakref
from dataclasses import replace

import numpy as np
import pytest

from recipe.partial_rollout.checkpoint.plain_state import pack
from recipe.partial_rollout.config.settings import FailureLimits, FilterSettings, Mode, SchedulingPolicy
from recipe.partial_rollout.manager.codec import capture, encode, restore
from recipe.partial_rollout.manager.policies import common_value, missing
from tests.unit.shared import InProcess, begin, state_of, tokens_in


def groups_of(grants):
    return [grant.group_uid for grant in grants]


def finish_group(manager, grants, uid, output, **kwargs):
    for grant in grants:
        if grant.group_uid == uid:
            manager.finish(grant.sample_id, output(**kwargs))


def end_round(manager, running):
    """Take the batch, interrupt ``running`` and train it."""
    taken = manager.take_batch(stop=True)
    for sample_id in running:
        manager.interrupt(sample_id)
    manager.groups.train(group.uid for group in taken)


def test_overdue_sample_goes_to_whoever_asks(manager, output):
    m = manager(batch=1, n=2, overlap=1.0, max_staleness=1, workers=3, capacity=4, prompts=2)
    begin(m)
    granted = {f"w{i}": m.claim(f"w{i}") for i in range(3)}
    assert [len(grants) for grants in granted.values()] == [2, 2, 0]
    finish_group(m, granted["w0"], "0/0", output)
    m.release_worker("w1")
    end_round(m, [])
    begin(m)
    assert groups_of(m.claim("w2")) == ["0/1", "0/1"], "beyond its share, which is one: the round waits for them"


@pytest.mark.parametrize(
    ("policy", "overtake", "max_staleness"),
    [
        (SchedulingPolicy.BOUNDED, None, 4),
        (SchedulingPolicy.BOUNDED, 0, 4),
        # By the published key alone the carried group, of which nothing has finished, would wait until it is overdue.
        (SchedulingPolicy.SEED, None, 4),
        (SchedulingPolicy.SEED, None, 1),
    ],
)
def test_interrupted_sample_resumes_before_a_new_prompt(manager, output, segment, policy, overtake, max_staleness):
    m = manager(batch=1, n=2, overlap=1.0, max_staleness=max_staleness, policy=policy, overtake=overtake)
    begin(m)
    grants = m.claim("w0")
    finish_group(m, grants, "0/0", output)
    carried = [g.sample_id for g in grants if g.group_uid == "0/1"]
    for sample_id in carried:
        m.add(sample_id, [segment(3)])
    end_round(m, carried)
    begin(m)
    grants = m.claim("w0")
    assert groups_of(grants[:2]) == ["0/1"] * 2
    resumed = [(grant.segments, grant.order) for grant in grants if grant.group_uid == "0/1"]
    assert resumed == [((), 1)] * 2, "their worker holds the conversations; the engine queues by the order"


@pytest.mark.parametrize(
    ("overtake", "next_group"), [(None, "0/1"), (1.0, "0/1"), (0.3, "0/0"), (0, "0/0")], ids=["any", "1", ".3", "0"]
)
def test_prompts_that_train_in_order_run_in_order(manager, output, overtake, next_group):
    """0.3 of two groups is no position. Without a limit the group that is nearer to its end goes first."""
    m = manager(batch=2, n=2, overtake=overtake, workers=2)
    begin(m)
    second = next(grant for grant in m.claim("w0") if grant.group_uid == "0/1")
    m.finish(second.sample_id, output())
    m.release_worker("w0")
    assert groups_of(m.claim("w1", limit=1)) == [next_group]


def test_sample_that_the_next_batch_needs_runs_first_even_while_the_trainer_has_this_one(manager, output):
    m = manager(batch=1, n=1, overlap=1.0, max_staleness=1, policy=SchedulingPolicy.SEED, capacity=2)
    begin(m)
    finish_group(m, m.claim("w0"), "0/0", output)
    m.interrupt("0/1#0")
    m.take_batch(stop=False)
    assert groups_of(m.claim("w0", limit=1)) == ["0/1"]


def test_ssim_refills_to_its_budget_in_a_round_and_april_tops_up_unfinished_groups_only_before_one(manager, output):
    m = manager(batch=2, n=2, mode=Mode.SSIM)
    assert begin(m) == 2
    first, second, *_ = m.claim("w0")
    m.finish(first.sample_id, output())
    assert m.admit() == 0
    m.finish(second.sample_id, output())
    assert m.admit() == 1
    m = manager(batch=2, n=1, mode=Mode.APRIL, overlap=1.5)
    assert begin(m) == 5
    grants = m.claim("w0")
    for grant in grants[:2]:
        m.finish(grant.sample_id, output())
    assert m.admit() == 0 and m.round_complete()
    end_round(m, [g.sample_id for g in grants[2:]])
    assert begin(m) == 2


def test_april_below_a_batch_adds_so_many_at_a_time_until_a_batch_is_in_flight(manager, output):
    # 3 at a time for batches of 4: 6 run. After a batch of 4 that leaves 2 unfinished, two times 3 less those.
    m = manager(batch=4, n=1, mode=Mode.APRIL, overlap=-0.25)
    assert begin(m) == 6
    grants = m.claim("w0")
    for grant in grants[:4]:
        m.finish(grant.sample_id, output())
    end_round(m, [grant.sample_id for grant in grants[4:]])
    assert begin(m) == 4


def test_what_has_ended_cannot_end_again(manager, output):
    m = manager(batch=1, n=1)
    begin(m)
    (grant,) = m.claim("w0", limit=1)
    with pytest.raises(RuntimeError, match="take_batch: the round is not complete: 0 groups are ready, 1 are needed"):
        m.take_batch(stop=True)
    m.finish(grant.sample_id, output())
    for again in (lambda: m.finish(grant.sample_id, output()), lambda: m.interrupt(grant.sample_id)):
        with pytest.raises(RuntimeError, match="sample 0/0#0 is unknown or finished"):
            again()
    end_round(m, [])
    with pytest.raises(RuntimeError, match="0/0 was not taken"):
        m.groups.train(["0/0"])


def test_length_bias_shows_that_short_groups_train_first(manager, output, segment):
    m = manager(batch=1, n=1, overlap=1.0)

    def biases():
        return [m.metrics().get(f"length/{name}") for name in ("bias", "batch_bias")]

    begin(m)
    long, short = m.claim("w0")
    m.finish(short.sample_id, output(10))
    (batch,) = m.take_batch(stop=True)
    assert biases() == [None, None], "0/0 has no token yet: what is not defined is not logged"
    m.add(long.sample_id, [segment(40)])
    assert biases() == [10 / 40, 10 / 40], "the batch that the trainer has counts, and 0/0 with its length so far"
    m.groups.train([batch.uid])
    assert biases() == [10 / 40, None], "the trainer has no batch"
    begin(m)
    m.finish(long.sample_id, output(90))
    m.take_batch(stop=True)
    assert biases() == biases() == [1.0, 90 / 10], "looking ahead moves nothing"


# -- state_dict --------------------------------------------------------------------------------------------------------


def one_running(manager):
    m = manager(batch=1, n=1, overlap=0.0)
    begin(m)
    (grant,) = m.claim("w0")
    return m, grant.sample_id


def test_state_is_loaded_before_the_first_prompt_under_the_same_or_a_larger_bound(manager, prompts):
    m, _ = one_running(manager)
    with pytest.raises(RuntimeError, match="the manager has prompts already"):
        restore(manager(batch=1, n=1), state_of(m))
    fresh = manager(batch=1, n=1, max_staleness=5, prompts=0)
    restore(fresh, state_of(m))
    assert fresh.metrics()["inflight/groups"] == 1
    with pytest.raises(RuntimeError, match=r"prompt 0/0 was offered twice, or out of order: the last one was 0/99"):
        fresh.reserve.offer(prompts(1))
    fresh.reserve.offer(prompts(1, start=100))


def test_training_that_drained_goes_on_where_it_is_resumed_with_more_steps(manager, prompts, output):
    m = manager(batch=2, n=1, prompts=2)
    m.reserve.offer([], 0)
    begin(m)
    for grant in m.claim("w0"):
        m.finish(grant.sample_id, output())
    end_round(m, [])
    resumed = manager(batch=2, n=1, prompts=0)
    restore(resumed, state_of(m))
    assert resumed.wanted == 4
    resumed.reserve.offer(prompts(4)[2:])
    assert begin(resumed) == 2 and not resumed.round_complete()


def test_next_version_that_has_begun_is_not_saved_before_the_batch_is_trained(manager, output):
    """A restored run would have to train that batch again, under a version that is gone."""
    m, sample_id = one_running(manager)
    m.finish(sample_id, output())
    m.take_batch(stop=True)
    state_of(m)
    begin(m)
    with pytest.raises(RuntimeError, match="version 1 has begun, the batch before it is not trained: too early"):
        state_of(m)


def test_single_turn_sample_of_a_dead_worker_keeps_its_tokens_and_a_conversation_begins_anew(manager, segment):
    m, sample_id = one_running(manager)
    for turns, kept, lost in (((0, 0), 2, 0), ((0, 1), 0, 10)):
        m.add(sample_id, [replace(segment(5), turn=turn) for turn in turns])
        m.release_worker("w0")
        m.slots.register("w0", 4)
        (grant,) = [each for each in m.claim("w0") if each.sample_id == sample_id]
        assert len(grant.segments) == kept and not grant.held
        assert m.metrics()["failures/lost_tokens_total"] == lost
        m.samples.unfinished[sample_id].segments = []


def test_state_is_a_moment_that_later_verbs_do_not_change(manager, segment):
    m, sample_id = one_running(manager)
    captured = capture(m)
    m.add(sample_id, [segment(5)])
    assert [s["segments"] for g in captured["groups"] for s in g["samples"]] == [[]]


def test_output_has_as_many_tokens_as_log_probs_versions_and_mask_entries(output):
    with pytest.raises(RuntimeError, match="3 tokens, 3 mask entries, 2 log-probs and 3 versions: they must be equal"):
        replace(output(3), log_probs=np.zeros(2, np.float32))


# -- dynamic sampling --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("rewards", "differ"), [((1.0, 1.0), False), ((0.0, 1.0), True)])
def test_discarded_group_says_whether_its_scores_differ_after_a_resume_too(manager, output, rewards, differ):
    m, resumed = (manager(batch=1, prompts=prompts, group_filter=ACC) for prompts in (4, 0))
    begin(m)
    for grant, reward in zip(m.claim("w0")[:2], rewards, strict=True):
        m.finish(grant.sample_id, output(reward=reward, info={"acc": 0.0}))
    restore(resumed, encode(capture(m), InProcess().fetch))
    assert [gone.scores_differ for each in (m, resumed) for gone in each.groups.filtered] == [differ, differ]


# -- where outputs lie -------------------------------------------------------------------------------------------------


class Handle:
    def __init__(self, outputs):
        self.outputs = tuple(outputs)


class Shelf:
    """An output store without Ray; the outputs of a group live for as long as somebody holds what ``put`` returned."""

    def __init__(self):
        self.handles = weakref.WeakSet()

    def put(self, outputs):
        handle = Handle(outputs)
        self.handles.add(handle)
        return handle

    def fetch(self, stored):
        return {uid: handle.outputs for uid, handle in stored.items()}


def finish_some(m, output, count):
    """Finish the first ``count`` samples; the i-th has 2 + i tokens."""
    begin(m)
    for i, grant in enumerate(m.claim("w0")[:count]):
        m.finish(grant.sample_id, output(2 + i))


def held_by(m):
    return [sample.id for group in m.groups.by_order.values() for sample in group.samples if sample.output is not None]


def test_figures_and_checkpoint_do_not_tell_where_outputs_lay(manager, output):
    packed, figures = [], []
    for store in (InProcess(), Shelf()):
        m = manager(prompts=4, put=store.put)
        finish_some(m, output, 5)
        assert held_by(m) == ["0/2#0"], "those of groups that are ready are in the store"
        state = encode(capture(m), store.fetch)
        packed.append(pack(state))
        resumed = manager(prompts=0, put=store.put)
        restore(resumed, state)
        assert held_by(resumed) == held_by(m)
        m.groups.train([group.uid for group in m.take_batch(stop=True)])
        figures.append((tokens_in(m), tokens_in(resumed), m.counters, m.metrics()))
    assert packed[0] == packed[1] and figures[0] == figures[1]
    # A trained group's outputs are let go at once: until its round ends, the manager's process collects no garbage.
    assert len(store.handles) == 2, "those of the resumed manager"


def test_filtered_group_is_not_stored_and_its_outputs_are_let_go(manager, output):
    shelf = Shelf()
    m = manager(batch=1, prompts=4, group_filter=FilterSettings("acc"), put=shelf.put)
    first = output(2)
    alive = weakref.ref(first.response_ids)
    begin(m)
    for grant, each in zip(m.claim("w0")[:2], (first, output(3)), strict=True):
        m.finish(grant.sample_id, each)
    del first, each
    assert m.counters.filtered_groups == 1 and not shelf.handles and alive() is None
