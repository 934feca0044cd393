"""What the state machine does, as facts; ``test_manager_life`` has what always holds. N groups of n samples, one worker."""

import weakref

import pytest

from recipe.partial_rollout.checkpoint.plain_state import pack
from recipe.partial_rollout.config.settings import FailureLimits, FilterSettings, Mode, SchedulingPolicy
from recipe.partial_rollout.manager.codec import capture, encode, restore
from recipe.partial_rollout.manager.policies import common_value, missing
from tests.unit.shared import InProcess, begin, state_of, tokens_in

ACC = FilterSettings("acc")


def groups_of(leases):
    return [lease.group_uid for lease in leases]


def finish(manager, output, *sample_ids, **kwargs):
    for sample_id in sample_ids:
        manager.finish(sample_id, output(**kwargs))


def end_round(manager, running=()):
    """Take the batch, interrupt ``running`` and train it."""
    manager.take_batch(stop=True)
    for sample_id in running:
        manager.interrupt(sample_id)
    manager.groups.train()


def test_overdue_sample_goes_to_whoever_asks(manager, output):
    m = manager(batch=1, n=2, overlap=1.0, max_staleness=1, workers=3, capacity=4, prompts=2)
    begin(m)
    assert [len(m.claim(f"w{i}")) for i in range(3)] == [2, 2, 0]
    finish(m, output, "0/0#0", "0/0#1")
    m.release_worker("w1")
    end_round(m)
    begin(m)
    assert groups_of(m.claim("w2")) == ["0/1", "0/1"], "beyond its share, which is one: the round waits for them"


@pytest.mark.parametrize(
    ("policy", "overtake"),
    [(SchedulingPolicy.BOUNDED, None), (SchedulingPolicy.BOUNDED, 0), (SchedulingPolicy.SEED, None)],
)
def test_interrupted_sample_resumes_before_a_new_prompt(manager, output, policy, overtake):
    """By the published key alone the carried group, of which nothing has finished, would wait until it is overdue."""
    m = manager(batch=1, n=2, overlap=1.0, max_staleness=4, policy=policy, overtake=overtake)
    begin(m)
    m.claim("w0")
    finish(m, output, "0/0#0", "0/0#1")
    end_round(m, ["0/1#0", "0/1#1"])
    begin(m)
    assert groups_of(m.claim("w0"))[:2] == ["0/1"] * 2


def test_sample_that_the_next_batch_needs_runs_first_beside_the_trainer(manager, output):
    """By the published key alone a new prompt would go first."""
    m = manager(batch=2, n=1, overlap=1.0, max_staleness=1, policy=SchedulingPolicy.SEED, workers=2, capacity=3)
    begin(m)
    assert groups_of(m.claim("w0")) == ["0/0", "0/1"] and groups_of(m.claim("w1", limit=1)) == ["0/2"]
    finish(m, output, "0/0#0", "0/1#0")
    m.take_batch(stop=False)
    m.release_worker("w1")
    assert groups_of(m.claim("w0", limit=1)) == ["0/2"]


def test_ssim_refills_within_a_round_and_april_tops_up_before_one(manager, output):
    m = manager(batch=2, n=2, mode=Mode.SSIM)
    assert begin(m) == 2
    m.claim("w0")
    for sample_id, admitted in (("0/0#0", 2), ("0/0#1", 3)):
        finish(m, output, sample_id)
        m.admit()
        assert m.counters.admitted_groups == admitted, "as far as its budget of samples goes"
    m = manager(batch=2, n=1, mode=Mode.APRIL, overlap=1.5)
    assert begin(m) == 5
    m.claim("w0")
    finish(m, output, "0/0#0", "0/1#0")
    m.admit()
    assert m.counters.admitted_groups == 5 and m.round_complete()
    end_round(m, ["0/2#0", "0/3#0", "0/4#0"])
    assert begin(m) == 2
    # Below a batch: 3 at a time for batches of 4, so 6 run. After a batch that leaves 2 unfinished, two times 3 less those.
    m = manager(batch=4, n=1, mode=Mode.APRIL, overlap=-0.25)
    assert begin(m) == 6
    m.claim("w0")
    finish(m, output, *[f"0/{i}#0" for i in range(4)])
    end_round(m, ["0/4#0", "0/5#0"])
    assert begin(m) == 4


def test_length_bias_shows_that_short_groups_train_first(manager, output, segment):
    m = manager(batch=1, n=1, overlap=1.0)

    def biases():
        return [m.metrics().get(f"length/{name}") for name in ("bias", "batch_bias")]

    begin(m)
    m.claim("w0")
    finish(m, output, "0/1#0", length=10)
    m.take_batch(stop=True)
    assert biases() == [None, None], "0/0 has no token yet: what is not defined is not logged"
    m.add("0/0#0", [segment(40)])
    assert biases() == [10 / 40, 10 / 40], "the batch that the trainer has counts, and 0/0 with its length so far"
    m.groups.train()
    assert biases() == [10 / 40, None], "the trainer has no batch"
    begin(m)
    finish(m, output, "0/0#0", length=90)
    m.take_batch(stop=True)
    assert biases() == biases() == [1.0, 90 / 10], "looking ahead moves nothing"


# -- state -------------------------------------------------------------------------------------------------------------


def test_training_that_drained_goes_on_where_it_is_resumed_with_more_steps(manager, prompts, output):
    m = manager(batch=2, n=1, prompts=2)
    m.backlog.enqueue([], 0)
    begin(m)
    finish(m, output, *[lease.sample_id for lease in m.claim("w0")])
    end_round(m)
    resumed = manager(batch=2, n=1, prompts=0, max_staleness=5)
    restore(resumed, state_of(m))
    assert resumed.wanted == 4
    with pytest.raises(RuntimeError, match=r"prompt 0/1 was offered twice, or out of order: the last one was 0/1"):
        resumed.backlog.enqueue(prompts(4)[1:])
    resumed.backlog.enqueue(prompts(4)[2:])
    assert begin(resumed) == 2 and not resumed.round_complete()


def test_state_is_a_moment_that_later_verbs_do_not_change(manager, segment):
    m = manager(batch=1, n=1, overlap=0.0)
    begin(m)
    m.claim("w0")
    captured = capture(m)
    m.add("0/0#0", [segment(5)])
    assert [s["segments"] for g in captured["groups"] for s in g["samples"]] == [[]]


# -- dynamic sampling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("info", "said"), [({}, "nothing"), ({"acc": None}, "None"), ({"acc": "yes"}, "'yes'")])
def test_reward_without_the_metric_is_named_and_its_group_is_not_judged(output, info, said):
    assert f"metric=acc: the reward function gives {said}; it gives numbers for" in missing("acc", 1.0, info)
    assert common_value("acc", [output(info=info), output(info=info)]) is None


@pytest.mark.parametrize(("n", "failing", "filtered"), [(2, 1, 0), (2, 2, 0), (3, 1, 1)])
def test_masked_samples_have_no_say_and_failures_are_not_filtered_away(manager, output, n, failing, filtered):
    """A group with one sample to judge trains, so that what failed in it counts against ``max_masked_fraction``."""
    m = manager(batch=1, n=n, prompts=9, failures=FailureLimits(sample_retries=0), group_filter=ACC)
    begin(m)
    m.claim("w0")
    for i in range(failing):
        m.fail(f"0/0#{i}", "boom")
    finish(m, output, *[f"0/0#{i}" for i in range(failing, n)])
    assert m.counters.filtered_groups == filtered


@pytest.mark.parametrize(("rewards", "differ"), [((1.0, 1.0), False), ((0.0, 1.0), True)])
def test_discarded_group_says_whether_its_scores_differ_after_a_resume_too(manager, output, rewards, differ):
    m, resumed = (manager(batch=1, prompts=prompts, group_filter=ACC) for prompts in (4, 0))
    begin(m)
    m.claim("w0")
    for i, reward in enumerate(rewards):
        finish(m, output, f"0/0#{i}", reward=reward, info={"acc": 0.0})
    restore(resumed, state_of(m))
    assert [gone.scores_differ for each in (m, resumed) for gone in each.groups.filtered] == [differ, differ]


# -- where outputs lie -------------------------------------------------------------------------------------------------


class Shelf:
    """An output store without Ray; knows which outputs are alive."""

    def __init__(self):
        self.outputs = []

    def put(self, outputs):
        self.outputs.append(weakref.ref(outputs[0].response_ids))
        return tuple(outputs)

    fetch = staticmethod(dict)


def test_figures_and_checkpoint_do_not_tell_where_outputs_lay(manager, output):
    packed, figures = [], []
    for store in (InProcess(), Shelf()):
        m = manager(prompts=4, put=store.put)
        begin(m)
        for i, lease in enumerate(m.claim("w0")[:5]):
            m.finish(lease.sample_id, output(2 + i))
        held = [sample.id for group in m.groups.by_order.values() for sample in group.samples if sample.output]
        assert held == ["0/2#0"], "those of groups that are ready are in the store"
        packed.append(pack(encode(capture(m), store.fetch)))
        end_round(m)
        figures.append((tokens_in(m), m.counters, m.metrics()))
    assert packed[0] == packed[1] and figures[0] == figures[1]
    # A trained group's outputs are let go at once: until its round ends, the manager's process collects no garbage.
    assert [alive() for alive in store.outputs] == [None, None]
