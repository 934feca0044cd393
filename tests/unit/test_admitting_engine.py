"""A request is admitted once the engine core has it, and leaves nothing behind however its caller goes away.

``tests/e2e/test_interruption.py`` and ``test_log_probs.py`` show the same of vLLM's own engine: its answers, its queue, its
log-probs.
"""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from recipe.partial_rollout.engine.replica import AdmittingEngine, RecipeVLLMServer
from tests.e2e.bare_server import serve

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
