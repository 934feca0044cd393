"""The manager keeps no output of a READY group, and its checkpoint is the same wherever outputs lie."""

import weakref

from recipe.partial_rollout.checkpoint.plain_state import pack
from recipe.partial_rollout.config.settings import FilterSettings
from recipe.partial_rollout.manager.codec import capture, encode, restore
from tests.unit.shared import InProcess, begin, tokens_in


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
