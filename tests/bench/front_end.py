"""What vLLM's front end costs a token, and how long it holds up an interruption, where the engine is quicker than it.

Front end and engine core are real, each in its process; the executor makes tokens at once. With the recipe's scheduler,
which sends tokens in pieces, and with vLLM's own, in turns. Every token and log-prob that arrives is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import tempfile
import time
from typing import Any, NamedTuple

from recipe.partial_rollout.engine.hold import pause
from recipe.partial_rollout.engine.replica import AdmittingEngine
from tests.bench.instant_executor import engine_args, log_prob_at, token_at
from verl_ext.vllm_plugin import PIECEWISE

BOUND = (
    "Exit code 1 if a token costs more than 0.4 of what it costs with vLLM's own scheduler, or an interruption takes more "
    "than 0.15 s."
)
BOUND_OF_OWN, BOUND_S = 0.4, 0.15
_PROMPT, _RESPONSE, _LONG = 32, 400, 3900
_AFTER_S = 2.0
"""seconds after which running requests are interrupted or held: a front end that is behind has a queue by then"""
_LIMIT_S = 120
"""seconds for whatever is awaited"""


Answer = Any
"""vLLM's ``CompletionOutput``"""


class Seen(NamedTuple):
    """Of one repeat."""

    tokens_per_s: float
    front_us: float
    """microseconds of the front end's processor time for a token"""
    interruption_s: float
    """until every request has ended"""
    hold_s: float
    """until the engine stands still and every token is counted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--running", type=int, nargs="+", default=[64, 256, 1024], metavar="N", help="requests that run"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="engines of each scheduler, in turns")


def run(options: argparse.Namespace) -> int:
    """Prints median and range of each figure, by requests and scheduler; 1 if a bound is missed."""
    missed = False
    for running in options.running:
        seen: dict[str, list[Seen]] = {"vLLM's": [], "pieces": []}
        for _ in range(options.repeats):
            for name, repeats in seen.items():
                repeats.append(asyncio.run(measure(running, PIECEWISE if name == "pieces" else None)))
        print(json.dumps({"running": running, **{name: _figures(repeats) for name, repeats in seen.items()}}, indent=2))
        cost = {name: statistics.median(each.front_us for each in repeats) for name, repeats in seen.items()}
        missed |= cost["pieces"] > BOUND_OF_OWN * cost["vLLM's"]
        missed |= statistics.median(each.interruption_s for each in seen["pieces"]) > BOUND_S
    return int(missed)


def _figures(repeats: list[Seen]) -> dict[str, list[float]]:
    """Median, smallest and largest."""
    columns = zip(Seen._fields, zip(*repeats, strict=True), strict=True)
    return {name: [float(f"{of(column):.3g}") for of in (statistics.median, min, max)] for name, column in columns}


async def measure(running: int, scheduler: str | None) -> Seen:
    """One engine's figures."""
    from vllm.v1.engine.async_llm import AsyncLLM

    with tempfile.TemporaryDirectory() as directory:
        args = engine_args(
            directory,
            max_num_seqs=running,
            max_model_len=_PROMPT + _LONG + 1,
            max_num_batched_tokens=max(8192, running),
            block_size=32,
            num_gpu_blocks_override=(running + 1) * (_PROMPT + _LONG) // 32,
            async_scheduling=True,
            disable_log_stats=False,
            scheduler_cls=scheduler,
        )
        config = args.create_engine_config()
        config.scheduler_config.async_scheduling = True  # The CPU platform turns it off.
        engine = AsyncLLM.from_vllm_config(config, disable_log_stats=False)
        try:
            return await _measure(AdmittingEngine(engine), running)
        finally:
            engine.shutdown()


async def _measure(engine: AdmittingEngine, running: int) -> Seen:
    names = map(str, itertools.count())

    def start(tokens: int) -> asyncio.Future[list[Answer]]:
        return asyncio.gather(*[_respond(engine, next(names), i, tokens) for i in range(running)])

    async def ended(answers: asyncio.Future[list[Answer]]) -> list[Answer]:
        return await asyncio.wait_for(answers, _LIMIT_S)

    await ended(start(_PROMPT))
    gc.freeze()
    began, used = time.perf_counter(), time.process_time()
    whole = await ended(start(_RESPONSE))
    took, used = time.perf_counter() - began, time.process_time() - used
    long = start(_LONG)
    await asyncio.sleep(_AFTER_S)
    began = time.perf_counter()
    await pause(engine, clear_kv=False)
    hold_s = time.perf_counter() - began
    await engine.resume_generation()
    await asyncio.sleep(_AFTER_S)
    began = time.perf_counter()
    await engine.pause_generation(clear_cache=False)
    cut = await ended(long)
    interruption_s = time.perf_counter() - began
    for i, answer in enumerate(whole + cut):
        check(answer, 4 + i % running % 90)
    made = sum(len(answer.token_ids) for answer in whole)
    assert made == running * _RESPONSE, f"{made} tokens of {running} requests"
    return Seen(made / took, used / made * 1e6, interruption_s, hold_s)


async def _respond(engine: AdmittingEngine, name: str, i: int, tokens: int) -> Answer:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=tokens, logprobs=0, detokenize=False)
    prompt, last = TokensPrompt(prompt_token_ids=[4 + i % 90, *range(5, _PROMPT + 4)]), None
    async for output in engine.generate(prompt=prompt, sampling_params=params, request_id=name, priority=i):
        last = output
    assert last is not None
    return last.outputs[0]


def check(answer: Answer, first: int) -> None:
    """Raises ``AssertionError`` if a token or log-prob is not the one that the executor made."""
    at = range(_PROMPT, _PROMPT + len(answer.token_ids))
    assert list(answer.token_ids) == [token_at(first, position) for position in at], first
    said = [row[token].logprob for token, row in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert all(abs(value - log_prob_at(position)) < 1e-6 for value, position in zip(said, at, strict=True)), first
