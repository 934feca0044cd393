"""The manager never looks into an output that lies elsewhere, and its checkpoint is the same wherever outputs lie."""

import weakref

from recipe.partial_rollout.checkpoint.plain_codec import pack
from recipe.partial_rollout.config.settings import FilterSettings
from recipe.partial_rollout.manager.codec import InProcess, encode
from recipe.partial_rollout.manager.types import StoredOutput
from tests.unit.shared import begin, tokens_in


class Handle:
    def __init__(self, output):
        self.output = output


class Shelf:
    """An output store without Ray; ``outputs`` live for as long as somebody holds what ``put`` returned."""

    def __init__(self):
        self.outputs = weakref.WeakValueDictionary()

    def put(self, finished):
        stored = []
        for sample_id, output in finished:
            handle = self.outputs[sample_id] = Handle(output)
            said = output.response_length, output.reward_score, output.reward_extra_info, output.masked
            stored.append(StoredOutput(sample_id, handle, *said))
        return stored

    def fetch(self, outputs):
        return [output.handle.output for output in outputs]


def finish_some(m, output, store, count):
    """Finish the first ``count`` samples; the i-th has 2 + i tokens."""
    begin(m)
    finished = [(grant.sample_id, output(2 + i)) for i, grant in enumerate(m.claim("w0")[:count])]
    for (sample_id, _), held in zip(finished, store.put(finished), strict=True):
        m.finish(sample_id, held)


def test_figures_and_checkpoint_do_not_tell_where_outputs_lay(manager, output):
    packed, figures = [], []
    for store in (InProcess(), Shelf()):
        m = manager(prompts=4)
        finish_some(m, output, store, 5)
        packed.append(b"".join(bytes(chunk) for chunk in pack(encode(m.capture(), store.fetch))))
        m.groups.train([group.uid for group in m.take_batch(stop=True)])
        figures.append((tokens_in(m), m.counters, m.metrics()))
    assert packed[0] == packed[1] and figures[0] == figures[1]
    # A trained group's outputs are let go at once: until its round ends, the manager's process collects no garbage.
    assert sorted(store.outputs) == ["0/2#0"]


def test_filtered_groups_are_judged_by_what_the_manager_holds_and_their_outputs_let_go(manager, output):
    m, shelf = manager(batch=1, prompts=4, group_filter=FilterSettings("acc")), Shelf()
    finish_some(m, output, shelf, 2)
    assert m.counters.filtered_groups == 1 and not shelf.outputs
