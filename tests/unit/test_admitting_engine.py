"""A request is admitted once the engine core has it, and leaves nothing behind however its caller goes away."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from recipe.partial_rollout.engine.admitting_engine import AdmittingEngine
from recipe.partial_rollout.engine.replica import RecipeVLLMServer

PARAMS = SamplingParams(max_tokens=5)


class Queue:
    """A request's outputs: a text, or what the engine raises; waits when there is none."""

    decodes, metrics = True, None

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
        answers = [SimpleNamespace(token_ids=[5] if self.decodes else [])]
        return SimpleNamespace(text=output, finished=output == "last", outputs=answers, metrics=self.metrics)

    def close(self):
        self.closed = True


class Engine:
    """``AsyncLLM`` as far as ``AdmittingEngine`` knows it."""

    model_config = "its own"

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


def generate(engine):
    return AdmittingEngine(engine).generate(prompt="p", sampling_params=PARAMS, request_id="r", priority=3)


def outputs_of(engine):
    async def run():
        return [output and output.text async for output in generate(engine)]

    return asyncio.run(run())


def test_request_is_admitted_before_its_first_output():
    engine = Engine("first", "last")
    assert outputs_of(engine) == [None, "first", "last"]
    ((request_id, prompt, _, options),) = engine.added
    assert (request_id, prompt, options) == ("r", "p", {"priority": 3})
    assert engine.aborted == [] and engine.queues[0].closed


@pytest.mark.parametrize(
    ("decodes", "metrics", "queued_s"),
    [
        (True, SimpleNamespace(queued_ts=100.0, scheduled_ts=102.5), 2.5),
        (True, None, 0.0),
        (False, SimpleNamespace(queued_ts=0.0, scheduled_ts=0.0), 0.05),
        (False, None, 0.05),
    ],
    ids=["ran", "ran, statistics off", "never ran", "never ran, statistics off"],
)
def test_request_tells_how_long_it_was_queued(monkeypatch, decodes, metrics, queued_s):
    monkeypatch.setattr(Queue, "decodes", decodes)
    monkeypatch.setattr(Queue, "metrics", metrics)

    async def run():
        engine = Engine()
        front = AdmittingEngine(engine)
        generator = front.generate(prompt="p", sampling_params=PARAMS, request_id="r")
        await anext(generator)
        await asyncio.sleep(0.05)
        engine.queues[0].outputs.append("last")
        await anext(generator)
        return front.take_queued_s("r"), front.take_queued_s("r")

    first, again = asyncio.run(run())
    assert again == 0.0
    if queued_s == 0.05:
        assert first >= 0.04, "the whole time"
    else:
        assert first == queued_s


@pytest.mark.parametrize(("asked", "sent"), [("CUMULATIVE", "FINAL_ONLY"), ("DELTA", "DELTA")])
def test_engine_sends_what_is_read_and_the_callers_parameters_are_left_alone(asked, sent):
    engine, params = Engine("last"), SamplingParams(max_tokens=5, output_kind=RequestOutputKind[asked])

    async def run():
        async for _ in AdmittingEngine(engine).generate(prompt="p", sampling_params=params, request_id="r"):
            pass

    asyncio.run(run())
    assert engine.added[0][2].output_kind is RequestOutputKind[sent] and engine.added[0][2].max_tokens == 5
    assert params.output_kind is RequestOutputKind[asked]


def test_everything_else_is_the_engines_own():
    assert AdmittingEngine(Engine()).model_config == "its own"


def test_caller_that_goes_away_takes_its_request_with_it():
    async def run(engine):
        task = asyncio.ensure_future(anext_of(generate(engine), 2))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    engine = Engine()
    assert asyncio.run(run(engine)) and engine.aborted == [("r-internal", True)] and engine.queues[0].closed


async def anext_of(generator, count):
    for _ in range(count):
        await anext(generator)


def test_caller_that_goes_away_during_admission_leaves_no_request():
    async def run(engine):
        engine.takes.clear()
        task = asyncio.ensure_future(anext_of(generate(engine), 1))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    engine = Engine()
    asyncio.run(run(engine))
    assert engine.aborted == [("r", False)], "the engine may have it, under no other name than the caller's"


@pytest.mark.parametrize("when", ["refuses", "output"])
def test_dead_engine_is_asked_for_nothing_more(when):
    engine = Engine(refuses=EngineDeadError()) if when == "refuses" else Engine(EngineDeadError())
    with pytest.raises(EngineDeadError):
        outputs_of(engine)
    assert engine.aborted == []


def test_error_passes_as_it_is():
    engine = Engine(ValueError("the engine says so"))
    with pytest.raises(ValueError, match="the engine says so"):
        outputs_of(engine)
    assert engine.aborted == [("r-internal", True)]


def test_request_under_admission_when_the_gate_closes_is_covered_by_the_pause():
    """The pause must not overtake it: it would come back from the engine in the next round, under new weights."""

    async def run():
        engine = Engine()
        told = []

        async def pause(**options):
            told.append("paused")
            engine.queues[0].outputs.append("last")

        engine.pause_generation = pause
        engine.output_processor = SimpleNamespace(request_states={})
        server = object.__new__(RecipeVLLMServer)
        server.config = SimpleNamespace(custom={})
        server.node_rank = server._admitting = 0
        server._submission_paused = server._rejecting = False
        server._resume_event = asyncio.Event()
        server.engine = engine
        server.front_engine()

        async def request():
            assert await server._park_until_admitted("r") is None
            texts = []
            async for output in server.engine.generate(prompt="p", sampling_params=PARAMS, request_id="r"):
                if not texts:
                    server._admitting -= 1
                texts.append(output and output.text)
            return texts

        engine.takes.clear()
        running = asyncio.ensure_future(request())
        await asyncio.sleep(0.01)
        interrupting = asyncio.ensure_future(server.abort_all_requests(reject_request=True))
        await asyncio.sleep(0.05)
        before = list(told)
        engine.takes.set()
        await asyncio.wait_for(interrupting, 5)
        return before, told, await asyncio.wait_for(running, 5)

    assert asyncio.run(run()) == ([], ["paused"], [None, "last"])


class VLLMFront:
    """vLLM's own output processor and queues before an engine core that is played by the test."""

    def __init__(self):
        from vllm.v1.engine.output_processor import OutputProcessor

        self.processor = OutputProcessor(tokenizer=None, log_stats=True)

    async def add_request(self, request_id, prompt, params):
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestOutputCollector

        internal = f"{request_id}-internal"
        queue = RequestOutputCollector(params.output_kind, internal)
        request = EngineCoreRequest(
            internal, prompt, None, params, None, 0.0, None, None, None, external_req_id=request_id
        )
        self.processor.add_request(request, None, None, 0, queue)
        return queue

    async def generate(self, *, prompt, sampling_params, request_id):
        """As ``AsyncLLM.generate``: every output."""
        queue, ended = await self.add_request(request_id, prompt, sampling_params), False
        while not ended:
            output = await queue.get()
            ended = output.finished
            yield output

    def step(self, request_id, *tokens, events=None, finish_reason=None):
        """The engine core has made ``tokens``; each has the log-prob -token / 8."""
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.metrics.stats import IterationStats
        from vllm.v1.outputs import LogprobsLists

        ids = np.array(tokens, np.int64)[:, None]
        log_probs = LogprobsLists(ids, -ids / 8, np.zeros(len(tokens), np.int64))
        output = EngineCoreOutput(
            f"{request_id}-internal",
            list(tokens),
            new_logprobs=log_probs if tokens else None,
            events=events,
            finish_reason=finish_reason,
        )
        self.processor.process_outputs([output], 103.0, IterationStats())


@pytest.mark.parametrize("made", [0, 1, 7])
def test_aborted_request_has_all_its_tokens_and_log_probs_though_only_its_last_output_is_sent(made):
    """vLLM's output processor gives them to both kinds of request alike: none if it never ran."""
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, FinishReason

    params = SamplingParams(max_tokens=9, logprobs=0, detokenize=False)
    scheduled = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, 100.0),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 102.0),
    ]

    async def read(generator):
        return [output async for output in generator if output is not None]

    async def run():
        front = VLLMFront()
        ours = AdmittingEngine(front)
        reading = [
            asyncio.ensure_future(read(engine.generate(prompt=[1, 2], sampling_params=params, request_id=name)))
            for name, engine in (("every", front), ("last", ours))
        ]
        await asyncio.sleep(0)
        for token in range(3, 3 + made):
            for name in ("every", "last"):
                front.step(name, token, events=scheduled if token == 3 else None)
            await asyncio.sleep(0)
        for name in ("every", "last"):
            front.step(name, finish_reason=FinishReason.ABORT)
        return (
            await asyncio.wait_for(asyncio.gather(*reading), 5),
            ours.take_queued_s("last"),
            front.processor.request_states,
        )

    (every, last), queued_s, left = asyncio.run(run())
    assert (len(every), len(last)) == (made + 1, 1) and not left
    for answer in (every[-1].outputs[0], last[0].outputs[0]):
        assert answer.finish_reason == "abort"
        assert list(answer.token_ids) == list(range(3, 3 + made))
        assert [row[token].logprob for token, row in zip(answer.token_ids, answer.logprobs, strict=True)] == [
            -token / 8 for token in answer.token_ids
        ]
    assert queued_s == 2.0 if made else 0 < queued_s < 5
