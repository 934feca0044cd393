"""The engine's half: a request leaves nothing behind, a hold ends, tokens have versions, a server comes back.

Real engines show the rest: their answers, queues, caches and log-probs in ``tests/e2e`` (``test_interruption.py``,
``test_hold.py``, ``test_log_probs.py``), and a hold or an interruption at each step in
``tests/integration/test_async_scheduling.py``.
"""

import asyncio
import itertools
import subprocess
from argparse import Namespace
from types import SimpleNamespace
from unittest.mock import AsyncMock, call

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from recipe.partial_rollout.config import releases
from recipe.partial_rollout.engine import replica
from recipe.partial_rollout.engine.hold import UNKNOWN, record_marks, spans
from recipe.partial_rollout.engine.replica import AdmittingEngine, RecipeVLLMServer, _end_processes, vLLMHttpServer
from tests.e2e.bare_server import serve
from verl_ext.vllm_plugin import PIECEWISE

PARAMS = SamplingParams(max_tokens=5)


class Queue:
    """A request's outputs: a text, or what the engine raises; waits when there is none."""

    def __init__(self, request_id, outputs):
        self.request_id, self.outputs, self.closed = f"{request_id}-internal", list(outputs), False

    def get_nowait(self):
        return None

    async def get(self):
        while not self.outputs:
            await asyncio.sleep(0.001)
        output = self.outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        answers = [SimpleNamespace(token_ids=[5], logprobs=None)]
        return SimpleNamespace(text=output, finished=output == "last", outputs=answers, metrics=None)

    def close(self):
        self.closed = True


class Engine:
    """``AsyncLLM`` as far as ``AdmittingEngine`` knows it."""

    def __init__(self, *outputs, refuses=None):
        self.outputs, self.refuses = outputs, refuses
        self.takes = asyncio.Event()
        self.takes.set()
        self.added, self.aborted, self.queues = [], [], []

    async def add_request(self, request_id, prompt, params, **options):
        self.added.append((request_id, prompt, params, options))
        await self.takes.wait()
        if self.refuses is not None:
            raise self.refuses
        self.queues.append(Queue(request_id, self.outputs))
        return self.queues[-1]

    async def abort(self, request_id, internal=False):
        self.aborted.append((request_id, internal))


def generate(engine, params=PARAMS):
    return AdmittingEngine(engine).generate(prompt="p", sampling_params=params, request_id="r", priority=3)


async def read(generator):
    return [output and output.text async for output in generator]


@pytest.mark.parametrize(("asked", "sent"), [("CUMULATIVE", "FINAL_ONLY"), ("DELTA", "DELTA")])
def test_request_is_admitted_before_its_first_output(asked, sent):
    engine, params = Engine("first", "last"), SamplingParams(max_tokens=5, output_kind=RequestOutputKind[asked])
    assert asyncio.run(read(generate(engine, params))) == [None, "first", "last"]
    ((request_id, prompt, used, options),) = engine.added
    assert (request_id, prompt, options) == ("r", "p", {"priority": 3})
    assert used.output_kind is RequestOutputKind[sent] and used.max_tokens == 5
    assert used.flat_logprobs == (sent == "FINAL_ONLY")
    assert params.output_kind is RequestOutputKind[asked]
    assert engine.aborted == [] and engine.queues[0].closed


@pytest.mark.parametrize(
    ("admitted", "aborted"),
    # During its admission the engine may have it, under no other name than the caller's.
    [(True, ("r-internal", True)), (False, ("r", False))],
)
async def test_caller_that_goes_away_takes_its_request_with_it(admitted, aborted):
    engine = Engine()
    if not admitted:
        engine.takes.clear()
    task = asyncio.ensure_future(read(generate(engine)))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and engine.aborted == [aborted]
    assert all(queue.closed for queue in engine.queues)


@pytest.mark.parametrize(
    ("engine", "error", "aborted"),
    [
        (Engine(refuses=EngineDeadError()), EngineDeadError, []),
        (Engine(EngineDeadError()), EngineDeadError, []),
        (Engine(ValueError("the engine says so")), ValueError, [("r-internal", True)]),
    ],
    ids=["dead, refuses", "dead, output", "alive"],
)
def test_error_passes_as_it_is_and_a_dead_engine_is_asked_for_nothing_more(engine, error, aborted):
    with pytest.raises(error):
        asyncio.run(read(generate(engine)))
    assert engine.aborted == aborted


async def test_request_under_admission_is_covered_by_the_pause():
    """The pause must not overtake it: it would come back from the engine in the next round, under new weights."""
    engine, told, texts = Engine(), [], []

    async def pause(**options):
        told.append("paused")
        engine.queues[0].outputs.append("last")

    engine.pause_generation, engine.engine_core = pause, AsyncMock()
    engine.output_processor = SimpleNamespace(request_states={})
    fronted = serve(engine, RecipeVLLMServer)

    async def request():
        assert await fronted._park_until_admitted("r") is None
        async for output in fronted.engine.generate(prompt="p", sampling_params=PARAMS, request_id="r"):
            if not texts:
                fronted._admitting -= 1
            texts.append(output and output.text)

    engine.takes.clear()
    running = asyncio.ensure_future(request())
    await asyncio.sleep(0.01)
    interrupting = asyncio.ensure_future(fronted.abort_all_requests(reject_request=True))
    await asyncio.sleep(0.05)
    assert told == []
    engine.takes.set()
    await asyncio.wait_for(asyncio.gather(interrupting, running), 5)
    assert told == ["paused"] and texts == [None, "last"]


# -- holds ---------------------------------------------------------------------------------------------------------------


def engine_of(*, handled=True, **state):
    """``AsyncLLM`` as far as a hold knows it; ``handled``: its output handler takes what comes at once."""
    queue = SimpleNamespace(put_nowait=lambda item: None, empty=lambda: handled)
    core = AsyncMock(outputs_queue=queue, engine_ranks_managed=[0])
    processor = SimpleNamespace(request_states={})
    return AsyncMock(engine_core=core, output_processor=processor, errored=False, **state)


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("resume_kv", ["recompute", "keep"])
async def test_kv_blocks_are_dropped_once_a_sync_unless_they_are_kept(resume_kv, sees):
    """What a vision tower has made of images is of the old weights, too, and is kept in no case."""
    model = SimpleNamespace(is_multimodal_model=sees)
    engine, drops = engine_of(model_config=model), resume_kv == "recompute"
    ours = serve(engine, RecipeVLLMServer, resume_kv=resume_kv)
    await ours.hold()
    await ours.clear_kv_cache()
    await ours.resume_generation()
    assert engine.mock_calls == [
        call.engine_core.pause_scheduler_async(mode="keep", clear_cache=False),
        *[call.reset_prefix_cache(reset_running_requests=True, reset_connector=True)] * drops,
        *[call.reset_encoder_cache()] * sees,
        call.resume_generation(),
    ]
    engine.reset_mock()
    await ours.abort_all_requests(reject_request=True)
    await ours.clear_kv_cache()
    assert engine.mock_calls == [
        call.engine_core.pause_scheduler_async(mode="keep", clear_cache=False),
        call.pause_generation(wait_for_inflight_requests=False, clear_cache=drops),
        *[call.reset_prefix_cache(reset_connector=True), call.reset_mm_cache()] * drops,
        call.reset_encoder_cache(),
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


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=8), st.integers(0, 4), st.booleans())
def test_every_token_has_the_version_that_made_it(holds, last, told):
    """``holds``: tokens made before each hold, and whether weights change in it; ``told``: the server knows them."""
    marks, made, version = {"r": []}, [], 3
    for tokens, changes in holds:
        made += [version if told else UNKNOWN] * tokens
        record_marks(marks, {"r": len(made)}, version if told else None)
        version += changes
    made += [version] * last
    found = spans(len(made), marks["r"], version)
    assert list(itertools.chain(*[[span.version] * (span.stop - span.start) for span in found])) == made
    assert [span.start for span in found] == [0, *[span.stop for span in found[:-1]]]
    assert all(span.stop > span.start for span in found) or (not made and len(found) == 1)


@pytest.mark.parametrize("marks", [[(4, 1)], [(2, 1), (1, 2)], [(-1, 1)]])
def test_marks_of_another_request_are_refused(marks):
    with pytest.raises(RuntimeError, match="do not fit a request of 3 tokens"):
        spans(3, marks, 5)


# -- the server and its restart --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "tokens"), [(768, 1536), (None, None)])
def test_kv_cache_of_two_engines_is_vllms_own_figure(said, tokens):
    cache, parallel = Namespace(kv_cache_size_tokens=said), Namespace(data_parallel_size=2)
    engine = Namespace(vllm_config=Namespace(cache_config=cache, parallel_config=parallel))
    assert asyncio.run(serve(engine, RecipeVLLMServer).kv_tokens()) == tokens


@pytest.mark.parametrize(
    ("release", "given", "taken"),
    [
        ("0.31.0", {"watermark": 0.0, "scheduler_cls": None}, {"watermark": 0.05, "scheduler_cls": PIECEWISE}),
        # What the user has set stays.
        ("0.31.0", {"watermark": 0.2, "scheduler_cls": "own.S"}, {"watermark": 0.2, "scheduler_cls": "own.S"}),
        # A release that is not tested, and lacks the watermark.
        ("0.30.0", {"scheduler_cls": None}, {"scheduler_cls": None}),
    ],
)
async def test_server_gets_headroom_and_pieces_unless_the_user_or_vllm_has_others(monkeypatch, release, given, taken):
    monkeypatch.setattr(releases, "vllm", lambda: release)
    monkeypatch.setattr(vLLMHttpServer, "run_server", AsyncMock())
    server, args = object.__new__(RecipeVLLMServer), Namespace(**given)
    server.config, server.replica_rank, server.engine = Namespace(custom={"kv_headroom": 0.05}), 1, None
    await server.run_server(args)
    assert vars(args) == taken


async def test_failed_weight_sync_keeps_its_first_error(monkeypatch):
    failures = [ValueError("not of a sync"), OSError("no space left"), RuntimeError("the sender has gone")]
    monkeypatch.setattr(vLLMHttpServer, "collective_rpc", AsyncMock(side_effect=failures))
    server = object.__new__(RecipeVLLMServer)
    for method, failure in zip(["profile", *["update_weights_from_ipc"] * 2], failures, strict=True):
        with pytest.raises(type(failure)):
            await server.collective_rpc(method)
    assert await server.weight_sync_error() == "OSError: no space left"


def test_only_the_processes_that_a_killed_server_left_behind_are_ended():
    engine, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        created = psutil.Process(engine.pid).create_time()
        # The second one has taken the id of an engine that is gone.
        _end_processes(None, [(engine.pid, created), (other.pid, created - 100.0), (2**22 + 1, created)])
        assert not psutil.pid_exists(engine.pid) and other.poll() is None
    finally:
        for process in (engine, other):
            process.kill()
            process.wait()


def test_workers_give_back_their_caches_before_a_restarted_engine_measures(monkeypatch):
    """And the sender looks its server up again, in a trainer as beside an engine. Ray is slow to free the server's name."""
    done, fused, alone = [], Namespace(server_handle="dead"), Namespace(server_handle="dead")
    senders = [Namespace(worker_dict={"actor_rollout": Namespace(rollout=fused)}), Namespace(server_adapter=alone)]

    async def note(what):
        done.append(what)

    async def launch():
        await note("launch")
        restarted.servers = ["new"]
        if done.count("launch") < 7:
            raise ValueError("the name is already taken")

    def called_in(worker):
        async def call(function, *args):
            done.append(function.__name__)
            function(worker, *args)

        return Namespace(__ray_call__=Namespace(remote=call))

    restarted = object.__new__(replica.RecipeVLLMReplica)
    restarted.servers, restarted.workers = [], [called_in(sender) for sender in senders]
    restarted.gpus_per_replica_node, restarted._engine_processes = 1, []
    restarted.launch_servers, restarted.sleep = launch, lambda: note("sleep")
    monkeypatch.setattr(replica.asyncio, "sleep", lambda _: note("pause"))
    asyncio.run(restarted.relaunch())
    tries = ["pause", "launch"] * 7
    assert done == ["_empty_cache"] * 2 + tries + ["_forget_server"] * 2 + ["sleep"] and restarted.servers == ["new"]
    assert fused.server_handle is None and alone.server_handle is None
