"""A request's tokens are told apart by the version that made them, whatever the order of holds and tokens."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.partial_rollout.engine.hold import UNKNOWN, note_marks, spans


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=8),
    st.integers(0, 4),
    st.booleans(),
)
def test_every_token_has_the_version_that_made_it(holds, last, told):
    """``holds``: tokens made before each hold, and whether weights change in it; ``told``: the server knows them."""
    marks, made, version = {"r": []}, [], 3
    for tokens, changes in holds:
        made += [version if told else UNKNOWN] * tokens
        note_marks(marks, {"r": len(made)}, version if told else None)
        version += changes
    made += [version] * last
    found = spans(len(made), marks["r"], version)
    assert list(itertools.chain(*[[span.version] * (span.stop - span.start) for span in found])) == made
    assert [span.start for span in found] == [0, *[span.stop for span in found[:-1]]]
    assert all(span.stop > span.start for span in found) or (not made and len(found) == 1)
    assert all(a.version != b.version for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("marks", [[(4, 1)], [(2, 1), (1, 2)], [(-1, 1)]])
def test_marks_of_another_request_are_refused(marks):
    with pytest.raises(RuntimeError, match="do not fit a request of 3 tokens"):
        spans(3, marks, 5)
