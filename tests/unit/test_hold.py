"""What a server drops of its caches, and when; a hold ends, whatever becomes of the engine; versions tell tokens apart.

``tests/integration/test_async_scheduling.py`` holds and interrupts vLLM's own engine at every step: its tokens, their
versions, and that nothing is left.
"""

import asyncio
import itertools
from types import SimpleNamespace
from unittest.mock import AsyncMock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.engine.exceptions import EngineDeadError

from recipe.partial_rollout.engine.hold import UNKNOWN, note_marks, spans
from recipe.partial_rollout.engine.replica import RecipeVLLMServer, vLLMHttpServer
from tests.e2e.bare_server import serve


def engine_of(*, handled=True, **state):
    """``AsyncLLM`` as far as a hold knows it; ``handled``: its output handler takes what comes at once."""
    queue = SimpleNamespace(put_nowait=lambda item: None, empty=lambda: handled)
    core = AsyncMock(outputs_queue=queue, engine_ranks_managed=[0])
    processor = SimpleNamespace(request_states={})
    return AsyncMock(engine_core=core, output_processor=processor, errored=False, **state)


@pytest.mark.parametrize("resume_kv", ["recompute", "keep"])
async def test_kv_blocks_are_dropped_once_a_sync_unless_they_are_kept(resume_kv):
    engine, drops = engine_of(), resume_kv == "recompute"
    ours = serve(engine, RecipeVLLMServer, resume_kv=resume_kv)
    await ours.hold()
    await ours.clear_kv_cache()
    await ours.resume_generation()
    assert engine.mock_calls == [
        call.engine_core.pause_scheduler_async(mode="keep", clear_cache=False),
        *[call.reset_prefix_cache(reset_running_requests=True, reset_connector=True)] * drops,
        call.resume_generation(),
    ]
    engine.reset_mock()
    await ours.abort_all_requests(reject_request=True)
    await ours.clear_kv_cache()
    assert engine.mock_calls == [
        call.engine_core.pause_scheduler_async(mode="keep", clear_cache=False),
        call.pause_generation(wait_for_inflight_requests=False, clear_cache=drops),
        *[
            call.reset_prefix_cache(reset_connector=True),
            call.reset_mm_cache(),
            call.reset_encoder_cache(),
        ]
        * drops,
    ]


async def test_hold_of_an_engine_that_dies_ends():
    dead = engine_of(handled=False, dead_error=EngineDeadError())
    dead.errored = True
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(serve(dead, RecipeVLLMServer).hold(), 5)


async def test_request_that_fails_leaves_nothing_at_its_server(monkeypatch):
    monkeypatch.setattr(vLLMHttpServer, "generate", AsyncMock(side_effect=OSError("the engine says so")))
    ours = serve(engine_of(), RecipeVLLMServer)
    with pytest.raises(OSError):
        await ours.generate([1], {}, "r")
    assert ours.engine.requests == {}


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
