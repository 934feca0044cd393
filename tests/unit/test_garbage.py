"""Python's full garbage collections keep out of rounds, and nothing is kept from them for longer."""

import gc
import weakref

import pytest

from recipe.partial_rollout.manager import garbage


class Cycle:
    def __init__(self):
        self.me = self


@pytest.fixture(autouse=True)
def released():
    yield
    garbage.release()


def test_collection_that_is_asked_for_passes_over_what_lived_when_the_round_began():
    before = weakref.ref(Cycle())
    garbage.hold()
    within = weakref.ref(Cycle())
    gc.collect()
    assert before() is not None and within() is None
    garbage.release()
    gc.collect()
    assert before() is None


def test_python_starts_no_full_collection_in_a_round_and_does_so_again_after_it():
    usual = gc.get_threshold()
    full = []
    gc.callbacks.append(lambda phase, info: full.append(info["generation"] == 2))

    def has_collected(objects):
        full.clear()
        kept = [[] for _ in range(objects)]
        return any(full), kept

    try:
        garbage.hold()
        assert gc.get_threshold()[:2] == usual[:2]
        assert not has_collected(len(gc.get_objects()) + 1_000_000)[0]
        garbage.release()
        assert gc.get_threshold() == usual
        assert has_collected(len(gc.get_objects()) + 1_000_000)[0]
    finally:
        gc.callbacks.pop()
