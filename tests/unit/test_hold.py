"""A hold keeps the engine's requests, and counts every token of the old weights before they change."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor

from recipe.partial_rollout.engine import hold
from recipe.partial_rollout.engine.replica import vLLMHttpServer

CHUNK = 2
"""requests whose tokens vLLM's output handler processes before it lets others run; 128 in vLLM"""


class Engine:
    """``AsyncLLM`` as far as a hold knows it: tokens come in steps, for each request one.

    Args:
        in_flight: steps that the core still finishes after it is asked to pause.
    """

    def __init__(self, *request_ids, in_flight=0):
        self.output_processor = SimpleNamespace(request_states={name: State(name) for name in request_ids})
        self.engine_core = SimpleNamespace(
            outputs_queue=asyncio.Queue(), pause_scheduler_async=self.pause, engine_ranks_managed=[0]
        )
        self.in_flight, self.did, self.aborts = in_flight, [], 0
        self.errored, self.dead_error, self.dies = False, EngineDeadError(), False
        self.output_handler = asyncio.ensure_future(self.handle())

    async def handle(self):
        while True:
            names = (await self.engine_core.outputs_queue.get()).outputs
            if self.dies:
                self.errored = True
                return
            for start in range(0, len(names), CHUNK):
                for name in names[start : start + CHUNK]:
                    self.output_processor.request_states[name].made += 1
                await asyncio.sleep(0)

    def step(self):
        names = list(self.output_processor.request_states)
        self.engine_core.outputs_queue.put_nowait(EngineCoreOutputs(outputs=names))

    async def pause(self, *, mode, clear_cache):
        assert mode == "keep" and not clear_cache
        self.did.append("paused")
        for _ in range(self.in_flight):
            self.step()
        self.in_flight = 0

    async def pause_generation(self, **options):
        self.aborts += 1

    async def reset_prefix_cache(self, **which):
        self.did.append(f"blocks dropped {which}")

    async def reset_encoder_cache(self):
        self.did.append("encodings dropped")

    async def resume_generation(self):
        self.did.append("resumed")

    async def reset_mm_cache(self):
        self.did.append("inputs dropped")


class State:
    """vLLM's ``RequestState``: known to the processor under an id of vLLM's own."""

    def __init__(self, name):
        self.external_req_id, self.made = name.removesuffix("-internal"), 0
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: self.made)


@pytest.fixture
def serving(server):
    """``serving(engine, *requests, ...)``: a server that has begun to mark ``requests``."""

    def build(engine, *begun, resume_kv="recompute"):
        made = server(engine, version=3, resume_kv=resume_kv)
        for name in begun:
            made._marks.begin(name)
        return made

    return build


DROPPED = "blocks dropped {'reset_running_requests': True, 'reset_connector': True}"


@pytest.mark.parametrize("resume_kv", ["recompute", "keep"])
async def test_hold_drops_the_blocks_unless_they_are_kept_and_the_sync_within_it_drops_no_more(serving, resume_kv):
    engine = Engine("r-internal")
    held = serving(engine, resume_kv=resume_kv)
    await held.hold()
    await held.clear_kv_cache()
    await held.resume_generation()
    did, engine.did = engine.did, []
    await held.clear_kv_cache()
    during, after = did, engine.did
    dropped = [DROPPED] if resume_kv == "recompute" else []
    assert during == ["paused", *dropped, "encodings dropped", "resumed"]
    assert "encodings dropped" in after, "without a hold it is verl's again"


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("in_flight", [0, 2])
async def test_tokens_in_flight_at_the_hold_are_the_old_weights(serving, requests, in_flight):
    """They arrive at the output handler when the pause has been answered: a count at that moment would miss them."""
    names = [f"r{i}" for i in range(requests)]
    engine = Engine(*[f"{name}-internal" for name in names], in_flight=in_flight)
    held = serving(engine, *names)
    for _ in range(3):
        engine.step()
    await asyncio.sleep(0)
    await held.hold()
    assert [held._marks.take(name) for name in names] == [[(3 + in_flight, 3)]] * requests


async def test_vllms_own_output_handler_outlives_a_hold_and_logs_for_an_engine_that_it_knows():
    logged = []
    engine = Engine("r-internal")
    engine.output_handler.cancel()
    engine.output_handler = None
    engine.engine_core.engine_ranks_managed = [2, 3]
    engine.engine_core.get_output_async = engine.engine_core.outputs_queue.get
    engine.output_processor = OutputProcessor(None, log_stats=True)
    engine.log_stats, engine.renderer = True, SimpleNamespace(stat_mm_cache=lambda: None)
    engine.logger_manager = SimpleNamespace(record=lambda **seen: logged.append(seen))
    AsyncLLM._run_output_handler(engine)  # type: ignore[arg-type]
    for _ in range(2):
        await asyncio.wait_for(hold.freeze(engine, clear_kv=False), 5)
    await asyncio.sleep(0)
    assert not engine.output_handler.done()
    engine.output_handler.cancel()
    nothing = {"scheduler_stats": None, "iteration_stats": None, "mm_cache_stats": None}
    assert logged == [{"engine_idx": 2, **nothing}] * 2


async def test_hold_of_an_engine_that_dies_ends(serving):
    with pytest.raises(EngineDeadError):
        engine = Engine("r-internal", in_flight=1)
        engine.dies = True
        await asyncio.wait_for(serving(engine).hold(), 5)


async def test_request_that_is_aborted_during_a_hold_ends_and_one_resumption_suffices(serving):
    engine = Engine("r-internal")
    held = serving(engine)
    for first, then in ((held.hold, held.abort_all_requests), (held.abort_all_requests, held.hold)):
        engine.did = []
        await first()
        await then()
        assert held._submission_paused and held._held
        await held.clear_kv_cache()
        await held.resume_generation()
        assert not held._submission_paused and not held._held
        assert engine.did[0] == "paused" and engine.did[-1] == "resumed"
    assert engine.aborts == 2


async def test_server_without_an_engine_has_nothing_to_hold(serving):
    headless = serving(None)
    headless.node_rank = 1
    await headless.hold()
    assert not headless._held


@pytest.mark.parametrize("fails", [False, True])
def test_answer_of_a_held_request_has_its_marks_and_the_server_keeps_none(serving, monkeypatch, fails):
    async def generate(self, prompt_ids, sampling_params, request_id, **options):
        self._marks.note({request_id: 2}, 3)
        if fails:
            raise OSError("the engine says so")
        return SimpleNamespace(token_ids=[5, 6, 7], extra_fields={"global_steps": 4})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)

    async def run():
        held = serving(SimpleNamespace(take_queued_s=lambda request_id: 0.0))
        try:
            return await held.generate([1], {}, "r")
        finally:
            assert held._marks._of == {}

    if fails:
        with pytest.raises(OSError):
            asyncio.run(run())
    else:
        assert asyncio.run(run()).extra_fields["version_marks"] == [(2, 3)]


def test_vllm_without_pause_modes_is_found_out(tmp_path, monkeypatch):
    assert hold.has_pause_modes()
    at = tmp_path / "v1" / "engine" / "async_llm.py"
    at.parent.mkdir(parents=True)
    at.write_text("class AsyncLLM:\n    async def pause_generation(self, *, wait_for_inflight_requests=False): ...\n")
    for origin in (str(tmp_path / "__init__.py"), str(tmp_path / "v1" / "__init__.py"), None):
        found = origin and SimpleNamespace(origin=origin)
        monkeypatch.setattr(hold, "find_spec", lambda name, found=found: found)
        assert not hold.has_pause_modes()
