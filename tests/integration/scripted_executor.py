"""vLLM's executor without a model: the real front, engine core and scheduler plan steps whose result can be computed.

The KV cache is an array of (token, position, version of the weights) by slot. A step writes the slots of its tokens,
reads those of all tokens so far, and says:

* the next token: a hash of what it has read, so a token lost, doubled or misplaced changes all that follow;
* its log-prob: -(1 + version) of the weights that made it, and .5 less if a key that it read is of other weights.

As on a GPU, a step runs in its turn after it was planned, and its output arrives later still. The worker's side of
both of vLLM's protocols is kept: model runner V1 finds a resumed request among the cached ones, V2 among the new ones,
and V2 has as many places as seats, which it frees when it is told that a request has ended or was preempted.
"""

import random
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

from tests.bench.instant_executor import InstantExecutor

LATE_S = 0.001
"""until an output has arrived, at most"""
STALL_S = 20
"""until a stalled step goes on by itself"""
FIRST, VOCABULARY = 10, 30
SEATS, BLOCK, BLOCKS = 3, 4, 13
"""``max_num_seqs``; tokens of a KV block, and blocks, one of them the engine's own"""
ROOM = {"plentiful": (2, 3, 4), "scarce": (10, 11, 12)}
"""lengths of prompts: three samples of 8 tokens fit into the KV cache, or do not"""


def engine_args(directory, **own):
    """Arguments of an engine on this executor; ``directory`` gets the config of its model."""
    from transformers import Qwen3Config
    from vllm.engine.arg_utils import AsyncEngineArgs

    shape = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    Qwen3Config(architectures=["Qwen3ForCausalLM"], **shape).save_pretrained(directory)
    return AsyncEngineArgs(
        model=str(directory),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=32,
        max_num_seqs=SEATS,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        scheduling_policy="priority",
        enable_prefix_caching=True,
        distributed_executor_backend=f"{__name__}.ScriptedExecutor",
        **own,
    )


def prompt_of(number, length):
    """Of a sample; those of other samples begin with another token."""
    return [1 + (number + i) % 9 for i in range(length)]


def response_to(prompt, length):
    whole = list(prompt)
    while len(whole) < len(prompt) + length:
        whole.append(next_token(whole))
    return whole[len(prompt) :]


def next_token(tokens):
    return FIRST + zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes()) % VOCABULARY


def log_prob(version, stale=False):
    return -(1.0 + version) - 0.5 * stale


class Place:
    """What a model runner knows of a request, from an admission to its end."""

    def __init__(self, tokens, blocks):
        self.tokens, self.blocks = list(tokens), list(blocks)


class ScriptedExecutor(InstantExecutor):
    def _init_executor(self):
        self.v2, self.version, self.faults = False, 0, []
        self.places, self.next = {}, None
        self.planned = self.done = 0
        self.stall = None
        self.device, self.courier = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.random = random.Random(0)

    def shutdown(self):
        self.device.shutdown(wait=False)
        self.courier.shutdown(wait=False)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, **_):
        own = getattr(self, f"do_{method}", None)
        return super().collective_rpc(method) if own is None else [own(*args, **(kwargs or {}))]

    def initialize_from_config(self, kv_cache_configs):
        self.kv = np.full((kv_cache_configs[0].num_blocks * self.cache_config.block_size, 3), -1, dtype=np.int32)

    def do_set_version(self, version):
        if self.planned > self.done:
            self.faults.append(f"weights change with {self.planned - self.done} steps under way")
        self.version = version

    def do_faults(self):
        return self.faults

    # The model runner's host side, in the core's thread.

    def execute_model(self, scheduler_output, non_block=False):
        for name in scheduler_output.finished_req_ids | ((self.v2 and scheduler_output.preempted_req_ids) or set()):
            self.places.pop(name, None)
        starts = self._admit(scheduler_output.scheduled_new_reqs)
        starts |= self._go_on(scheduler_output.scheduled_cached_reqs)
        work = [
            (name, self.places[name], list(self.places[name].blocks), starts[name], count)
            for name, count in scheduler_output.num_scheduled_tokens.items()
        ]
        future = Future()
        if work:
            self.planned += 1
            self.next = Future()
            self.device.submit(self._run, work, self.planned, self.next)
        future.set_result(None if work else EMPTY_MODEL_RUNNER_OUTPUT)
        return future if non_block else future.result()

    def sample_tokens(self, grammar_output, non_block=False):
        return self.next if non_block else self.next.result()

    def _admit(self, requests):
        """Positions from which they are computed, by name."""
        for request in requests:
            if self.v2:
                self.places.pop(request.req_id, None)
                assert len(self.places) < self.scheduler_config.max_num_seqs, "No free indices"
            tokens = request.prefill_token_ids if self.v2 else request.prompt_token_ids
            self.places[request.req_id] = Place(tokens, request.block_ids[0])
        return {request.req_id: request.num_computed_tokens for request in requests}

    def _go_on(self, cached):
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            place = self.places[name]
            if name in cached.all_token_ids:
                place = self.places[name] = Place(cached.all_token_ids[name], place.blocks)
            kept = [] if name in cached.resumed_req_ids else place.blocks
            place.blocks = [*kept, *(blocks[0] if blocks else ())]
        return dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    # The device, in a thread of its own.

    def _run(self, work, step, future):
        try:
            if self.stall:
                self._stand_still(step)
            output = self._output(work)
            self.done = step
            self.courier.submit(self._deliver, future, output)
        except Exception as error:
            self.faults.append(repr(error))
            future.set_exception(error)

    def _deliver(self, future, output):
        time.sleep(self.random.random() * LATE_S)
        future.set_result(output)

    def _stand_still(self, step):
        """At the step that was asked for: until the core has planned the next one, then until it is sent a message."""
        at, reached, messages = self.stall
        if step != at:
            return
        self.stall = None
        deadline = time.monotonic() + 0.005
        while self.planned == step and time.monotonic() < deadline:
            time.sleep(0.0002)
        reached.touch()
        deadline = time.monotonic() + STALL_S
        while messages.empty() and time.monotonic() < deadline:
            time.sleep(0.0002)

    def _output(self, work):
        sampled, said = [], []
        for name, place, blocks, start, count in work:
            stop, slots = start + count, self._slots(blocks, start + count)
            tokens = place.tokens[start:stop]
            if len(tokens) != count or len(slots) != stop:
                raise RuntimeError(f"{name}: {start} to {stop} of {len(place.tokens)} tokens in {len(blocks)} blocks")
            self.kv[slots[start:]] = np.stack([tokens, np.arange(start, stop), np.full(count, self.version)], axis=1)
            if stop < len(place.tokens):
                sampled.append([])
                said.append(0.0)
                continue
            read, positions, versions = self.kv[slots].T
            if (positions != np.arange(stop)).any() or (read != place.tokens).any():
                self.faults.append(f"{name}: after {stop} tokens its blocks hold another's")
            token = next_token(read)
            place.tokens.append(token)
            sampled.append([token])
            said.append(log_prob(self.version, (versions != self.version).any()))
        names = [name for name, *_ in work]
        ids = np.array([tokens or [0] for tokens in sampled])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(ids, np.array(said, dtype=np.float32)[:, None], np.ones(len(names), dtype=int)),
        )

    def _slots(self, blocks, stop):
        size = self.cache_config.block_size
        return (np.array(blocks)[:, None] * size + np.arange(size)).reshape(-1)[:stop]


def speak(core, v2):
    """From now on the idle engine speaks the protocol of model runner V2, or V1's."""
    scheduler, executor = core.scheduler, core.model_executor
    assert not scheduler.requests, "the engine is idle"
    scheduler.use_v2_model_runner = executor.v2 = v2
    scheduler.finished_req_ids.clear()
    executor.places.clear()


def stall(core, steps, reached):
    """Stand still ``steps`` steps from now, with the next step planned, until a message comes; then ``reached`` exists."""
    executor = core.model_executor
    executor.stall = (executor.planned + steps, Path(reached), core.input_queue) if steps else None


def counts(core):
    """Of tokens by request, of blocks in use, and of what is under way."""
    scheduler, pool = core.scheduler, core.scheduler.kv_cache_manager.block_pool
    requests = scheduler.requests.values()
    return {
        "tokens": {request.request_id: request.num_output_tokens for request in requests},
        "expected": sum(request.num_output_placeholders for request in requests),
        "steps": len(core.batch_queue),
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "preempted": getattr(scheduler, "preempted", None),
    }


EngineCore.speak, EngineCore.stall, EngineCore.counts = speak, stall, counts
