"""Separate placement: versions advance, and batches are taken, while the other samples run."""

import pytest

from recipe.partial_rollout.config.choices import Mode, SchedulingPolicy


def offered(manager):
    """The prompts that ``manager`` was built with are in its reserve already."""
    return manager.next_version(0, [])


def finish(manager, grants, output, *uids):
    for grant in grants:
        if grant.group_uid in uids:
            manager.finish(grant.sample_id, output())


def train(manager, taken):
    manager.acknowledge(group.uid for group in taken)
    return manager.next_version(manager.version + 1, [])


def test_others_run_on_while_a_batch_is_taken_and_the_version_advances(manager, output, segment):
    m = manager(batch=2, n=1, overlap=1.0)
    assert offered(m) == 4
    grants = m.claim("w0")
    finish(m, grants, output, "0/0", "0/2")
    taken = m.next_batch()
    assert [group.uid for group in taken] == ["0/0", "0/2"]
    m.add_segment("0/1#0", segment(3))
    assert train(m, taken) == 2
    m.add_segment("0/1#0", segment(2, version=1))
    finish(m, grants, output, "0/1")
    assert m.counters.interrupted == 0 and m.version == 1
    assert [grant.group_uid for grant in m.claim("w0")] == ["0/4", "0/5"]


def test_batch_that_the_trainer_has_counts_as_load(manager, output):
    """Prompts that start in its place are as old as the next version's: not all could be trained in time, and all wait."""
    m = manager(batch=1, n=1, mode=Mode.SSIM, in_flight=2, max_staleness=1)
    assert offered(m) == 2
    finish(m, m.claim("w0"), output, "0/0", "0/1")
    taken = m.next_batch()
    assert m.admit() == 0, "one group is in flight, and one with the trainer"
    assert m.claim("w0") == []
    assert train(m, taken) == 1
    assert [group.uid for group in m.next_batch()] == ["0/1"]


def test_prompts_of_the_next_version_are_offered_with_it(manager, prompts):
    m = manager(batch=2, overlap=0.5, prompts=0)
    assert m.next_version(7, prompts(10)) == 3
    assert m.version == 7 and m.round_open


def test_without_staleness_one_side_waits_for_the_other(manager, output):
    m = manager(batch=2, n=1, overlap=0.0, max_staleness=0)
    offered(m)
    for first in (0, 2, 4):
        uids = [f"0/{first}", f"0/{first + 1}"]
        grants = m.claim("w0")
        finish(m, reversed(grants), output, *uids)
        taken = m.next_batch()
        assert [group.uid for group in taken] == uids, "noPR's batches"
        assert m.admit() == 0 and m.claim("w0") == []
        train(m, taken)


def test_sample_that_the_next_batch_needs_runs_first_even_while_the_trainer_has_this_one(manager, output, segment):
    m = manager(batch=1, n=1, overlap=1.0, max_staleness=1, policy=SchedulingPolicy.SEED, capacity=2)
    offered(m)
    finish(m, m.claim("w0"), output, "0/0")
    m.interrupt("0/1#0")
    taken = m.next_batch()
    assert m._round.overdue == 0, "of version 1, which trains it next"
    assert [grant.group_uid for grant in m.claim("w0", limit=1)] == ["0/1"]
    train(m, taken)
    assert m._round.overdue == 0


def test_each_version_trains_one_batch(manager, output):
    m = manager(batch=1, n=1, overlap=1.0)
    with pytest.raises(RuntimeError, match="next_batch: the round is closed: call next_version first"):
        m.next_batch()
    offered(m)
    with pytest.raises(RuntimeError, match="next_version: the batch of version 0 is not trained: 1 cannot follow"):
        m.next_version(1, [])
    finish(m, m.claim("w0"), output, "0/0", "0/1")
    taken = m.next_batch()
    with pytest.raises(RuntimeError, match="next_batch: the round is ahead: call next_version first"):
        m.next_batch()
    with pytest.raises(RuntimeError, match="the batch of version 0 is not trained"):
        m.next_version(1, [])
    m.acknowledge(group.uid for group in taken)
    with pytest.raises(RuntimeError, match="next_version: 2 after 0: each version trains one batch"):
        m.next_version(2, [])
    with pytest.raises(RuntimeError, match="the round is open already"):
        m.open_round()


def test_stopped_run_goes_on_with_the_version_it_had(manager, output):
    m = manager(batch=1, n=1, overlap=1.0)
    offered(m)
    finish(m, m.claim("w0"), output, "0/0")
    m.close_round()
    assert m.claim("w0") == []
    state = m.state_dict()
    fresh = manager(batch=1, n=1, overlap=1.0, prompts=0)
    fresh.load_state_dict(state)
    fresh.next_version(0, [])
    assert [group.uid for group in fresh.next_batch()] == ["0/0"]


def test_uids_admitted_are_told_once_whatever_batches_are_taken(manager, output):
    m = manager(batch=1, n=1, overlap=1.0)
    offered(m)
    finish(m, m.claim("w0"), output, "0/0")
    taken = m.next_batch()
    assert m.take_admitted() == ("0/0", "0/1") and m.take_admitted() == ()
    train(m, taken)
    assert m.take_admitted() == ("0/2",)


def test_uids_admitted_are_told_after_a_restore_from_between_a_batch_and_its_update(manager, output):
    """The checkpoint is of the step before, so the ledger's lines of this step are undone."""
    m = manager(batch=1, n=1, overlap=1.0)
    offered(m)
    finish(m, m.claim("w0"), output, "0/0")
    m.next_batch()
    fresh = manager(batch=1, n=1, overlap=1.0, prompts=0)
    fresh.load_state_dict(m.state_dict())
    assert fresh.take_admitted() == ("0/0", "0/1")
    fresh.next_version(0, [])
    assert [group.uid for group in fresh.next_batch()] == ["0/0"]
