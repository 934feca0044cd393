"""Groups whose samples score alike are consumed without being trained, and replaced in the same round."""

import asyncio
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.config.choices import Mode, OnSampleError, SchedulingPolicy
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.messages import PromptsWanted, Report, RolloutFailedError
from recipe.partial_rollout.manager.policies import FailurePolicy, GroupFilter, MissingMetricError
from recipe.partial_rollout.records.ledger import Ledger
from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.step_book import StepBook
from recipe.partial_rollout.rollout.stop import StopSignals

ACC = GroupFilter("acc")


def begin(manager):
    """The version after the last batch."""
    return manager.begin_version(manager.version + manager._batch_taken)


def numbers(*taken):
    return [group.uid for groups in taken for group in groups]


@pytest.fixture
def filtering(manager):
    """A manager that filters by ``acc``, in an open round; the source has more to offer."""

    def build(*, group_filter=ACC, left=100, **sizes):
        m = manager(group_filter=group_filter, **sizes)
        m.note_source(left)
        begin(m)
        return m

    return build


def end_groups(m, output, *uids, equal=True):
    """Claim whatever can be, and end the groups ``uids`` with rewards alike, or with one that differs."""
    grants = [grant for worker in m.workers for grant in m.claim(worker)]
    for uid in uids:
        for index in range(2):
            m.finish(f"{uid}#{index}", output(reward=1.0 if equal else float(index)))
    return grants


def train(m):
    taken = m.take_batch(stop=True)
    m.acknowledge(group.uid for group in taken)
    return taken


# -- the judgement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["reward", "seq_reward", "seq_final_reward", "acc"])
def test_group_of_equal_values_shares_one(output, metric):
    assert GroupFilter(metric).common_value([output(reward=0.1)] * 3) == 0.1
    assert GroupFilter(metric).common_value([output(reward=0.1), output(reward=0.2)]) is None


def test_metric_decides_which_value_counts(output):
    penalised = [output(reward=1.0, info={"acc": 1.0}), output(reward=0.5, info={"acc": 1.0})]
    assert GroupFilter("acc").common_value(penalised) == 1.0
    assert GroupFilter("reward").common_value(penalised) is None


def test_metric_that_the_reward_lacks_is_named_with_those_it_has(output):
    with pytest.raises(MissingMetricError, match=r"metric=f1: the reward function returns no such value; one of .*acc"):
        GroupFilter("f1").common_value([output(), output()])
    with pytest.raises(MissingMetricError, match="metric=reward: a sample was not scored"):
        GroupFilter("reward").common_value([output(reward=None), output(reward=None)])


# -- replacement -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.WINDOW, Mode.APRIL])
def test_equal_group_is_replaced_in_the_same_round(filtering, output, mode):
    m = filtering(batch=2, overlap=0.0, mode=mode, over_sampling=2)
    end_groups(m, output, "0/0")
    assert (m.counters.filtered_groups, m.counters.filtered_tokens) == (1, 10)
    assert m.admit() == 1 and m.admit() == 0
    assert {g.group_uid for g in end_groups(m, output, "0/1", equal=False)} == {"0/2"}
    end_groups(m, output, "0/2", equal=False)
    assert m.round_complete() and numbers(train(m)) == ["0/1", "0/2"] and m.groups.lost == 0


def test_equal_group_is_no_part_of_the_batch(filtering, output):
    m = filtering(batch=2)
    end_groups(m, output, "0/0", "0/1")
    end_groups(m, output, "0/2", "0/3", equal=False)
    assert m.take_filtered() == (), "their admission comes with the batch"
    assert numbers(train(m)) == ["0/2", "0/3"]
    assert [(g.uid, g.order, g.birth, g.value, g.lengths) for g in m.take_filtered()] == [
        ("0/0", 0, 0, 1.0, [5, 5]),
        ("0/1", 1, 0, 1.0, [5, 5]),
    ]
    assert m.take_filtered() == ()


def test_in_order_the_next_group_takes_the_place_of_a_filtered_one(filtering, output):
    m = filtering(batch=2, policy=SchedulingPolicy.IN_ORDER)
    end_groups(m, output, "0/0")
    end_groups(m, output, "0/3", "0/2", equal=False)
    assert not m.round_complete()
    end_groups(m, output, "0/1", equal=False)
    assert m.round_complete() and numbers(train(m)) == ["0/1", "0/2"]


def test_group_that_ends_between_rounds_is_filtered_and_the_next_round_makes_up_for_it(filtering, output):
    m = filtering(batch=1, overlap=1.0)
    end_groups(m, output, "0/0", equal=False)
    m.take_batch(stop=True)
    m.finish("0/1#0", output())
    m.finish("0/1#1", output())
    assert m.counters.filtered_groups == 1
    m.acknowledge(["0/0"])
    assert begin(m) == 2 and m.admit() == 0


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


# -- limits ------------------------------------------------------------------------------------------------------------


def test_past_the_limit_of_a_round_equal_groups_are_trained(filtering, output):
    m = filtering(batch=2, overlap=1.0, group_filter=GroupFilter("acc", max_num_gen_batches=2))
    end_groups(m, output, "0/0", "0/1", "0/2", "0/3")
    assert (m.counters.filtered_groups, m.counters.spared_groups) == (2, 2)
    assert m.round_complete() and numbers(train(m)) == ["0/2", "0/3"]
    begin(m)
    end_groups(m, output, "0/4")
    assert m.counters.filtered_groups == 3, "the limit is that of one round"


def test_training_keeps_no_more_groups_than_it_trains(filtering, output):
    m = filtering(batch=2, overlap=2.0, train_groups=4)
    assert m.metrics()["inflight/groups"] == 4
    end_groups(m, output, "0/0")
    assert m.admit() == 1, "a filtered group does not count"
    end_groups(m, output, "0/1", "0/2", equal=False)
    train(m)
    assert begin(m) == 0
    end_groups(m, output, "0/3", "0/4", equal=False)
    train(m)
    assert m.counters.trained_groups == 4 and m.metrics()["inflight/groups"] == 0


def test_reserve_that_may_not_suffice_asks_for_prompts_in_the_round(filtering, output, prompts):
    m = filtering(batch=2, overlap=0.0, prompts=4)
    assert not m.short_of_prompts
    end_groups(m, output, "0/0")
    m.admit()
    assert m.short_of_prompts and m.wanted == 3
    m.offer(prompts(7)[4:])
    m.note_source(0)
    assert not m.short_of_prompts


# -- the end of the data -----------------------------------------------------------------------------------------------


def test_equal_groups_are_trained_where_the_data_has_no_other(filtering, output):
    m = filtering(batch=2, overlap=1.0, prompts=4, left=0)
    end_groups(m, output, "0/0", "0/1", "0/2", "0/3")
    assert numbers(train(m)) == ["0/2", "0/3"]
    assert (m.counters.filtered_groups, m.counters.spared_groups, m.groups.lost) == (2, 2, 0)


def test_prompts_yet_to_be_offered_count_one_by_one(filtering, output):
    """With one left in the source and none in reserve, one group may go, not all."""
    m = filtering(batch=2, overlap=0.0, prompts=2, left=1)
    end_groups(m, output, "0/0", "0/1")
    assert (m.counters.filtered_groups, m.counters.spared_groups) == (1, 1)


def test_data_that_cannot_fill_another_batch_is_exhausted(filtering, output):
    m = filtering(batch=2, overlap=1.0, prompts=4, left=0)
    end_groups(m, output, "0/0")
    end_groups(m, output, "0/1", "0/2", equal=False)
    train(m)
    assert m.exhausted and m.metrics()["inflight/groups"] == 1 and m.groups.lost == 0


def test_prompts_in_reserve_that_cannot_fill_a_batch_do_not_start(manager):
    m = manager(batch=2, overlap=0.0, prompts=1, group_filter=ACC)
    m.note_source(1)
    assert not m.exhausted
    m.note_source(0)
    assert m.exhausted


# -- figures and checkpoints -------------------------------------------------------------------------------------------


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


def test_checkpoint_of_before_there_was_a_filter_still_loads(manager, output):
    m = manager(batch=2, overlap=1.0)
    begin(m)
    end_groups(m, output, "0/0", "0/2")
    train(m)
    state = m.state_dict()
    for name in ("filtered_groups", "filtered_tokens", "spared_groups"):
        del state["counters"][name]
    del state["lengths"]["passed"], state["lengths"]["left_out"], state["filtered"]
    old = manager(batch=2, prompts=0)
    old.load_state_dict(state)
    assert old.metrics()["length/bias"] == m.metrics()["length/bias"] and old.groups.lost == 0


# -- behind the actor --------------------------------------------------------------------------------------------------


def actor(group_filter=ACC):
    return ManagerActor(
        Admission(Mode.WINDOW, 1, 2, 0.0, 2, 2, 4), Scheduling(), stall_s=30.0, group_filter=group_filter
    )


async def end_one(manager, output, grants, *rewards):
    """End the group of ``grants`` with ``rewards``; the grants of the next one."""
    ends = tuple((g.sample_id, output(reward=reward)) for g, reward in zip(grants, rewards, strict=True))
    return await manager.report(Report("w0", finished=ends))


def test_round_that_uses_its_prompts_up_goes_on_with_more(prompts, output):
    async def life():
        manager = actor()
        await manager.register_worker("w0", 2)
        await manager.begin_version(0, prompts(2), 10)
        second = await end_one(manager, output, await manager.claim("w0"), 1.0, 1.0)
        wanted = await asyncio.wait_for(manager.wait_batch(True), 5)
        assert isinstance(wanted, PromptsWanted)
        await manager.offer(prompts(2 + wanted.count)[2:], 8)
        third = await end_one(manager, output, second, 0.0, 0.0)
        await end_one(manager, output, third, 0.0, 1.0)
        batch = await asyncio.wait_for(manager.wait_batch(True), 5)
        await manager.flushed("w0")
        return numbers((await manager.finish_step(numbers(batch.groups))).filtered), numbers(batch.groups)

    assert asyncio.run(life()) == (["0/0", "0/1"], ["0/2"])


def test_round_is_not_opened_where_the_data_cannot_fill_it(prompts):
    async def life():
        manager = ManagerActor(Admission(Mode.WINDOW, 2, 2, 0.0, 4, 4, 4), Scheduling(), stall_s=30.0, group_filter=ACC)
        await manager.register_worker("w0", 2)
        return await manager.begin_version(0, [], 0)

    assert asyncio.run(life()).exhausted


def test_missing_metric_ends_the_run_by_its_name(prompts, output):
    async def life():
        manager = actor(GroupFilter("f1"))
        await manager.register_worker("w0", 2)
        await manager.begin_version(0, prompts(2), 10)
        await end_one(manager, output, await manager.claim("w0"), 1.0, 1.0)
        await asyncio.wait_for(manager.wait_batch(True), 5)

    with pytest.raises(RolloutFailedError, match=r"algorithm\.filter_groups\.metric=f1"):
        asyncio.run(life())


# -- behind the trainer ------------------------------------------------------------------------------------------------


class Here:
    """A ``ManagerActor`` in this process, with the call syntax of an actor handle."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(getattr(self._actor, name)(*args)))


class NoWorkers:
    """A ``WorkerPool`` in which nobody dies."""

    async def ended(self):
        await asyncio.sleep(1e6)

    async def ask(self, verb):
        return []


def context_of(source, directory):
    """What the trainer lends, without engines."""
    settings = SimpleNamespace(
        group_filter=ACC,
        separate=False,
        batch_groups=1,
        deadlines=SimpleNamespace(interrupt_s=5.0, stall_s=60.0),
        drain=True,
        dashboard=SimpleNamespace(progress_s=0),
    )
    return SimpleNamespace(
        source=source,
        stop=StopSignals(),
        ledger=Ledger(directory),
        settings=settings,
        control=SimpleNamespace(running_tokens=no_tokens),
        trainers=[],
    )


async def no_tokens():
    return {}


def wait_of(actor, source, directory):
    """The trainer's wait around ``actor``, without workers, engines and Ray; and the book of its rounds."""
    context = context_of(source, directory)
    book = StepBook(context, probe=None, overlap=None)
    return Guard(context, Here(actor), NoWorkers()), book


class Prompts:
    """A source of ``total`` prompts."""

    def __init__(self, prompts, total):
        self._all = prompts(total)

    @property
    def left(self):
        return len(self._all)

    def take(self, count):
        taken, self._all = self._all[:count], self._all[count:]
        return taken


async def run_worker(manager, output, dull):
    """Claim and end samples for ever; the first ``dull`` prompts score alike."""
    grants = []
    while True:
        grants = grants or await manager.claim("w0")
        ends = [
            (g.sample_id, output(reward=0.0 if int(g.group_uid[2:]) < dull else float(g.sample_id[-1]))) for g in grants
        ]
        grants = await manager.report(Report("w0", finished=tuple(ends)))


def test_trainer_offers_prompts_for_as_long_as_a_round_filters(prompts, output, tmp_path):
    async def life():
        manager, source = actor(), Prompts(prompts, 12)
        wait, book = wait_of(manager, source, tmp_path)
        await manager.register_worker("w0", 2)
        first = source.take(await manager.wanted())
        await manager.begin_version(0, first, source.left)
        working = asyncio.ensure_future(run_worker(manager, output, dull=9))
        batch = await asyncio.wait_for(wait.wait_batch(lambda: manager.wait_batch(True)), 10)
        working.cancel()
        await manager.flushed("w0")
        account = await manager.finish_step(numbers(batch.groups))
        figures = book._filter_metrics(1, len(account.filtered), account.metrics)
        return numbers(batch.groups), figures, source.left, account.filtered

    trained, figures, left, filtered = asyncio.run(life())
    assert trained == ["0/9"] and figures == {"filter/groups": 9, "filter/consumed": 10} and left <= 2
    assert [group.uid for group in filtered] == [f"0/{i}" for i in range(9)]


def test_trainer_is_told_that_the_data_is_exhausted_before_the_next_slot(prompts, tmp_path):
    async def life():
        manager = ManagerActor(Admission(Mode.WINDOW, 2, 2, 0.0, 4, 4, 4), Scheduling(), stall_s=30.0, group_filter=ACC)
        context, pool = context_of(Prompts(prompts, 1), tmp_path), NoWorkers()
        guard = Guard(context, Here(manager), pool)
        driver = Driver(context, Here(manager), *[None] * 7, guard=guard)
        await driver._take_prompts()
        driver._begin_version(0)
        await driver._begun()
        return driver.exhausted

    assert asyncio.run(life())


def test_equal_groups_that_are_trained_all_the_same_are_warned_of(prompts, tmp_path, capsys):
    book = StepBook(context_of(None, tmp_path), probe=None, overlap=None)
    for total in (2, 2, 3):
        book._filter_metrics(1, 0, {"filter/spared_total": total})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        f"step 1: groups of equal acc that are trained all the same: {count}" for count in (2, 1)
    ]
