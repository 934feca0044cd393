"""What the state machine does, as facts. The round used throughout: N groups of n samples, one worker."""

import pytest

from recipe.partial_rollout.config.choices import Mode, SchedulingPolicy
from tests.unit.shared import begin


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
    manager.acknowledge(group.uid for group in taken)
    return taken


def test_overdue_sample_goes_to_whoever_asks(manager, output):
    m = manager(batch=1, n=2, overlap=1.0, max_staleness=1, workers=3, capacity=4, prompts=2)
    begin(m)
    granted = {f"w{i}": m.claim(f"w{i}") for i in range(3)}
    assert [len(grants) for grants in granted.values()] == [2, 2, 0]
    for grant in granted["w0"]:
        m.finish(grant.sample_id, output())
    m.release_worker("w1")
    m.take_batch(stop=True)
    m.acknowledge(["0/0"])
    begin(m)
    assert groups_of(m.claim("w2")) == ["0/1", "0/1"], "beyond its share, which is one: the round waits for them"


@pytest.mark.parametrize(
    ("policy", "max_staleness", "first"),
    [
        (SchedulingPolicy.BOUNDED, 4, "0/1"),
        (SchedulingPolicy.IN_ORDER, 4, "0/1"),
        # The published key has the carried group, of which nothing has finished, wait until it is overdue.
        (SchedulingPolicy.SEED, 4, "0/2"),
        (SchedulingPolicy.SEED, 1, "0/1"),
    ],
)
def test_interrupted_sample_resumes_before_a_new_prompt(manager, output, segment, policy, max_staleness, first):
    m = manager(batch=1, n=2, overlap=1.0, max_staleness=max_staleness, policy=policy)
    begin(m)
    grants = m.claim("w0")
    finish_group(m, grants, "0/0", output)
    carried = [g.sample_id for g in grants if g.group_uid == "0/1"]
    for sample_id in carried:
        m.add_segment(sample_id, segment(3))
    end_round(m, carried)
    begin(m)
    grants = m.claim("w0")
    assert groups_of(grants[:2]) == [first] * 2
    resumed = [grant for grant in grants if grant.group_uid == "0/1"]
    assert [grant.segments for grant in resumed] == [(), ()], "their worker holds the conversations"
    assert [grant.order for grant in resumed] == [1, 1], "what the engine queues by"


def test_sample_that_the_next_batch_needs_runs_first_even_while_the_trainer_has_this_one(manager, output):
    m = manager(batch=1, n=1, overlap=1.0, max_staleness=1, policy=SchedulingPolicy.SEED, capacity=2)
    begin(m)
    finish_group(m, m.claim("w0"), "0/0", output)
    m.interrupt("0/1#0")
    m.take_batch(stop=False)
    assert groups_of(m.claim("w0", limit=1)) == ["0/1"]


@pytest.mark.parametrize(
    ("policy", "overtake", "complete"),
    [
        (SchedulingPolicy.BOUNDED, None, True),
        (SchedulingPolicy.BOUNDED, 0.0, False),
        (SchedulingPolicy.IN_ORDER, None, False),
        (SchedulingPolicy.IN_ORDER, 1.0, True),
    ],
)
def test_overtaking_is_limited_by_default_in_order_alone(manager, output, policy, overtake, complete):
    m = manager(batch=1, n=1, overlap=1.0, policy=policy, overtake=overtake)
    begin(m)
    m.finish(m.claim("w0")[1].sample_id, output())
    assert m.round_complete() is complete


def test_window_follows_the_overlap_that_is_set_between_rounds(manager):
    m = manager(batch=4, n=1, overlap=0.0)
    assert begin(m) == 4
    m.set_overlap(0.5)
    assert m.wanted == 0 and m.admit(version_begins=True) == 2
    m.set_overlap(0.25)
    assert m.admit(version_begins=True) == 0, "what is in flight stays"
    with pytest.raises(ValueError, match=r"overlap 4\.5: 0 to max_staleness=4"):
        m.set_overlap(4.5)


def test_ssim_refills_to_its_budget_in_the_middle_of_a_round(manager, output):
    m = manager(batch=2, n=2, mode=Mode.SSIM, in_flight=4)
    assert begin(m) == 2
    grants = m.claim("w0")
    m.finish(grants[0].sample_id, output())
    assert m.admit() == 0
    m.finish(grants[1].sample_id, output())
    assert m.admit() == 1


def test_april_tops_up_unfinished_groups_only_at_the_start_of_a_round(manager, output):
    m = manager(batch=2, n=1, mode=Mode.APRIL, over_sampling=5)
    assert begin(m) == 5
    grants = m.claim("w0")
    for grant in grants[:2]:
        m.finish(grant.sample_id, output())
    assert m.admit() == 0 and m.round_complete()
    end_round(m, [g.sample_id for g in grants[2:]])
    assert begin(m) == 2


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
    (taken,) = m.take_batch(stop=True)
    m.acknowledge([taken.uid])
    with pytest.raises(RuntimeError, match="0/0 was not taken"):
        m.acknowledge([taken.uid])


def test_training_that_drained_goes_on_where_it_is_resumed_with_more_steps(manager, prompts, output):
    m = manager(batch=2, n=1, overlap=1.0, prompts=2)
    m.note_source(0)
    begin(m)
    for grant in m.claim("w0"):
        m.finish(grant.sample_id, output())
    end_round(m, [])
    resumed = manager(batch=2, n=1, overlap=1.0, prompts=0)
    resumed.load_state_dict(m.state_dict())
    assert resumed.wanted == 4
    resumed.offer(prompts(4)[2:])
    assert begin(resumed) == 2 and not resumed.round_complete()


def test_length_bias_shows_that_short_groups_train_first(manager, output, segment):
    m = manager(batch=1, n=1, overlap=1.0)
    begin(m)
    long, short = m.claim("w0")
    assert not [key for key in m.metrics() if key.startswith("length/")], "what is not defined yet is not logged"
    m.finish(short.sample_id, output(10))
    (batch,) = m.take_batch(stop=True)
    assert m.metrics().keys().isdisjoint({"length/bias", "length/batch_bias"}), "0/0 has no token yet"
    m.add_segment(long.sample_id, segment(40))
    biases = m.metrics()["length/bias"], m.metrics()["length/batch_bias"]
    assert biases == (10 / 40, 10 / 40), "the batch that the trainer has counts, and 0/0 with its length so far"
    m.acknowledge([batch.uid])
    assert m.metrics()["length/bias"] == 10 / 40
    assert "length/batch_bias" not in m.metrics(), "the trainer has no batch"
    begin(m)
    m.finish(long.sample_id, output(90))
    m.take_batch(stop=True)
    for _ in range(2):
        biases = m.metrics()["length/bias"], m.metrics()["length/batch_bias"]
        assert biases == (1.0, 90 / 10), "looking ahead moves nothing"


def test_worker_keeps_at_least_one_slot(manager):
    with pytest.raises(ValueError, match="capacity of w0 is 0"):
        manager().resize_worker("w0", 0)


def test_batch_waits_for_a_group_that_could_not_be_trained_in_time_after_it(manager, output):
    m = manager(batch=1, n=1, overlap=1.0, max_staleness=1)
    begin(m)
    grants = m.claim("w0")
    finish_group(m, grants, "0/0", output)
    end_round(m, ["0/1#0"])
    begin(m)
    m.finish(next(grant.sample_id for grant in m.claim("w0") if grant.group_uid == "0/2"), output())
    assert not m.round_complete(), "0/1 is as old as it may be"
    m.finish("0/1#0", output())
    assert [group.uid for group in m.take_batch(stop=True)] == ["0/1"]
