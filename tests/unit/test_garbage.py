"""Python's full garbage collections keep out of rounds, and nothing is kept from them for longer."""

import gc
import weakref

from recipe.partial_rollout.manager import garbage


class Cycle:
    def __init__(self):
        self.me = self


def test_what_lived_when_a_round_began_is_collected_after_it_and_python_starts_no_full_collection_within():
    # Another test of this process may have left a round open.
    garbage.release()
    usual, before, full = gc.get_threshold(), weakref.ref(Cycle()), []
    garbage.hold()
    within = weakref.ref(Cycle())
    gc.collect()
    gc.callbacks.append(lambda phase, info: full.append(info["generation"] == 2))
    try:
        assert before() is not None and within() is None
        kept = [[] for _ in range(len(gc.get_objects()) + 1_000_000)]
        assert kept and full and not any(full)
    finally:
        gc.callbacks.pop()
        garbage.release()
    assert gc.get_threshold() == usual and gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None
