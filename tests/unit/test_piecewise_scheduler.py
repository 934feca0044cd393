"""Tokens sent in pieces are exactly those sent one by one, and a request leaves nothing behind.

vLLM's engine core, schedulers, encoder, decoder and output processor in this process; an executor without a model.
``tests/integration/test_async_scheduling.py`` holds and interrupts an engine with this scheduler at each of its steps.
"""

import queue
import time
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind as Kind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.bench.instant_executor import InstantExecutor, engine_args, log_prob_at, token_at
from verl_ext import piecewise_scheduler
from verl_ext.piecewise_scheduler import PIECE_TOKENS, PiecewiseScheduler
from verl_ext.vllm_plugin import PIECEWISE

LENGTHS = (1, 2, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 2 * PIECE_TOKENS + 1, 80, 200)


class Core(EngineCoreProc):
    """vLLM's core whose loop the test turns; no sockets, no threads."""

    def __init__(self, config):
        self.input_queue, self.output_queue = queue.Queue(), queue.Queue()
        self.engines_running = self.process_input_queue_block = self.publish_dp_lb_stats = False
        self.engine_index = 0
        EngineCore.__init__(self, config, InstantExecutor, True, None)
        self.step_fn = self.step if self.batch_queue is None else self.step_with_batch_queue

    def turn(self):
        if self.has_work():
            self._process_engine_step()
        else:
            self._notify_idle_state_callbacks()


class Request:
    """What was asked, and what has arrived."""

    def __init__(self, name, prompt, **asked):
        self.name, self.prompt = name, prompt
        self.params = SamplingParams(temperature=1.0, ignore_eos=True, logprobs=0, detokenize="stop" in asked, **asked)
        self.collector = RequestOutputCollector(self.params.output_kind, name)
        self.tokens, self.log_probs, self.reason = [], [], None

    def take(self, output):
        answer = output.outputs[0]
        # vLLM gives all log-probs with a DELTA output that has no tokens.
        said = [row[token].logprob for token, row in zip(answer.token_ids, answer.logprobs, strict=False)]
        earlier = self.params.output_kind is Kind.DELTA
        self.tokens = self.tokens * earlier + list(answer.token_ids)
        self.log_probs = self.log_probs * earlier + said
        self.reason = answer.finish_reason

    def faults(self):
        at = range(len(self.prompt), len(self.prompt) + len(self.tokens))
        wanted = [token_at(self.prompt[0], position) for position in at]
        stop = next((i for i, token in enumerate(wanted, 1) if token in (self.params.stop_token_ids or ())), None)
        whole = {"length": self.params.max_tokens, "stop": stop}.get(self.reason, len(self.tokens))
        if self.tokens != wanted or len(self.tokens) != whole or (self.reason == "length" and stop):
            return [f"{self.name}: {self.reason} after {self.tokens}"]
        right = self.log_probs == pytest.approx([log_prob_at(position) for position in at], abs=1e-6)
        return [] if right else [f"{self.name}: log-probs {self.log_probs}"]


class Bench:
    """An engine and its front end; ``faults`` collects whatever should not be."""

    def __init__(self, directory, *, asynchronous=True):
        args = engine_args(
            directory,
            async_scheduling=asynchronous,
            scheduler_cls=PIECEWISE,
            max_num_seqs=24,
            block_size=16,
            num_gpu_blocks_override=2000,
            max_model_len=512,
            max_num_batched_tokens=512,
        )
        config = args.create_engine_config()
        # The CPU platform turns it off.
        config.scheduler_config.async_scheduling = asynchronous
        self.core = Core(config)
        self.encode, self.decode = MsgpackEncoder().encode, MsgpackDecoder(EngineCoreOutputs).decode
        self.front = OutputProcessor(None, log_stats=True, stream_interval=1)
        self.live, self.outputs, self.faults = {}, 0, []

    def ask(self, name, prompt, **asked):
        request = self.live[name] = Request(name, prompt, **asked)
        sent = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=request.params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.front.add_request(sent, None, None, 0, request.collector)
        self.core.add_request(*self.core.preprocess_add_request(sent))
        return request

    def turn(self):
        self.core.turn()
        self.take()

    def take(self):
        """What the core has sent goes to the front, and from there to whoever asked."""
        while not self.core.output_queue.empty():
            _, message = self.core.output_queue.get_nowait()
            message = self.decode([bytes(part) for part in self.encode(message)])
            self.outputs += len(message.outputs)
            self.front.process_outputs(message.outputs, message.timestamp, IterationStats())
        for name, request in list(self.live.items()):
            while (output := request.collector.get_nowait()) is not None:
                request.take(output)
                if output.finished:
                    del self.live[name]
                    self.faults += request.faults()

    def withdraw(self, name):
        self.front.abort_requests([name], internal=True)
        self.core.abort_requests([name])
        self.take()

    def finish(self):
        for _ in range(5000):
            if not self.live:
                break
            self.turn()
        for _ in range(5):
            self.turn()
        scheduler = self.core.scheduler
        if left := self.live or scheduler._kept or scheduler._due or scheduler.requests:
            self.faults.append(f"left: {left}")


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_request_of_any_length_arrives_whole_unless_it_is_withdrawn(tmp_path, asynchronous):
    bench = Bench(tmp_path, asynchronous=asynchronous)
    for first, length in enumerate(LENGTHS, 4):
        stop = token_at(first, length + 9)
        bench.ask(f"all {length}", [first, 5], max_tokens=length, output_kind=Kind.FINAL_ONLY)
        bench.ask(f"each {length}", [first, 6], max_tokens=length, output_kind=Kind.DELTA)
        bench.ask(f"stops {length}", [first, 7], max_tokens=400, stop_token_ids=[stop], output_kind=Kind.FINAL_ONLY)
        bench.ask(f"goes {length}", [first, 8], max_tokens=400, output_kind=Kind.FINAL_ONLY)
    for length in LENGTHS:
        for _ in range(9):
            bench.turn()
        bench.withdraw(f"goes {length}")
    bench.finish()
    assert bench.faults == []


@pytest.mark.parametrize(
    ("asked", "tokens", "piece_s", "messages"),
    [
        ({}, 200, 1, range(20 * 200 // 16, 20 * 200 // 10)),
        # What is read as it comes is sent as it comes.
        ({"output_kind": Kind.DELTA}, 40, 1, [20 * 40]),
        ({"stop": ["x"]}, 40, 1, [20 * 40]),
        ({}, 40, 0, [20 * 40]),
    ],
    ids=["pieces", "DELTA", "a stop string", "steps slower than PIECE_S"],
)
def test_pieces_are_a_tenth_of_the_messages(tmp_path, monkeypatch, asked, tokens, piece_s, messages):
    """Of 20 requests that begin together."""
    monkeypatch.setattr(piecewise_scheduler, "PIECE_S", piece_s)
    bench = Bench(tmp_path)
    asked = {"output_kind": Kind.FINAL_ONLY, **asked}
    requests = [bench.ask(f"r{i}", [i + 4, 5, 6], max_tokens=tokens, **asked) for i in range(20)]
    bench.finish()
    assert [len(request.tokens) for request in requests] == [tokens] * 20 and bench.faults == []
    assert bench.outputs in messages


class Steps(Scheduler):
    """A scheduler whose steps send what the test says."""

    pause_state = PauseState.UNPAUSED

    def __init__(self):
        params = SamplingParams(output_kind=Kind.FINAL_ONLY)
        self.requests = {"r": SimpleNamespace(sampling_params=params, resumable=False)}

    def update_from_output(self, scheduler_output, message):
        return {0: message}


class PiecewiseSteps(PiecewiseScheduler, Steps):
    def __init__(self):
        super().__init__()
        # The next request's first piece is one less than a whole one.
        self._turn = PIECE_TOKENS - 2


class LaterOutput(EngineCoreOutput):
    """Of a later release."""

    new_sampling_mask: list[bool] | None = None
    weight: float = 0.0


class LaterOutputs(EngineCoreOutputs):
    error: str | None = None


MORE = (
    {"events": ["preempted"]},
    {"prefill_stats": "again"},
    {"num_nans_in_logits": 1},
    {"kv_transfer_params": {}},
    {"new_sampling_mask": [True]},
    {"weight": 2.0},
    {"finish_reason": "error"},
)


@pytest.mark.parametrize("more", MORE, ids=lambda more: next(iter(more)))
def test_output_that_says_more_than_tokens_is_sent_with_those_before_it(more):
    scheduler = PiecewiseSteps()

    def step(*tokens, **said):
        message = EngineCoreOutputs(outputs=[LaterOutput("r", list(tokens), **said)])
        sent = scheduler.update_from_output(None, message)
        return [output for message in sent.values() for output in message.outputs]

    assert [output.new_token_ids for output in step(1)] == [[1]]
    assert step(2) == step(3) == []
    (output,) = step(4, **more)
    assert output.new_token_ids == [2, 3, 4]
    assert {name: getattr(output, name) for name in more} == more


@pytest.mark.parametrize("more", [{}, {"error": "of the core"}, {"finished_requests": {"q"}}])
def test_message_that_says_more_than_outputs_is_sent(more):
    scheduler = PiecewiseSteps()
    for token in (1, 2):
        output = EngineCoreOutput("r", [token], trace_headers={"id": "1"})
        sent = scheduler.update_from_output(None, LaterOutputs(outputs=[output], **more))
    assert [(message.outputs, {name: getattr(message, name) for name in more}) for message in sent.values()] == (
        [([], more)] if more else []
    )
