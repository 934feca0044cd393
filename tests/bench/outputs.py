"""What the engine's outputs cost: every output with all its tokens, as verl asks, against the last one only.

The same requests run both ways, and a third time with vLLM's statistics on, in turns. The engine core decodes in a process
of its own, as in a replica's server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from tests.bench.distribution import add_engine_arguments, load_prompts

WAYS = ("every output", "last output", "last output, statistics on")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_engine_arguments(parser)
    parser.add_argument("--running", type=int, default=128, metavar="N", help="requests that run at once")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens of each response")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="repeats of each way")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints tokens/s of each way: all repeats and their median."""
    rates = asyncio.run(measure(options))
    medians = {way: round(statistics.median(rates[way])) for way in WAYS}
    print(
        json.dumps(
            {"running": options.running, "tokens": options.tokens, "medians": medians, "repeats": rates}, indent=2
        )
    )
    return 0


async def measure(options: argparse.Namespace) -> dict[str, list[int]]:
    """Tokens/s by way, in the order of the repeats; a repeat before the first is thrown away: engines compile in it."""
    from recipe.partial_rollout.engine.admitting_engine import AdmittingEngine

    prompts = load_prompts(options.model, options.data, options.running)
    prompts = [prompts[i % len(prompts)] for i in range(options.running)]
    quiet, counting = (_engine(options, max(map(len, prompts)), statistics_on=on) for on in (False, True))
    ways = dict(zip(WAYS, (quiet, AdmittingEngine(quiet), AdmittingEngine(counting)), strict=True))
    rates: dict[str, list[int]] = {way: [] for way in WAYS}
    try:
        for repeat in range(options.repeats + 1):
            for way, engine in ways.items():
                rate = await _rate(engine, prompts, options.tokens, f"{repeat} {way}")
                if repeat:
                    rates[way].append(round(rate))
    finally:
        quiet.shutdown()
        counting.shutdown()
    return rates


def _engine(options: argparse.Namespace, prompt_tokens: int, *, statistics_on: bool) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=options.model,
            dtype=options.dtype,
            enforce_eager=True,
            max_model_len=prompt_tokens + options.tokens,
            max_num_seqs=options.running,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=not statistics_on,
        )
    )


async def _rate(engine: Any, prompts: list[list[int]], tokens: int, name: str) -> float:
    """Tokens/s of one response of ``tokens`` to each prompt, all at once, with log-probs and without texts."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=tokens, logprobs=0, detokenize=False)

    async def respond(i: int, prompt: list[int]) -> int:
        last = None
        async for output in engine.generate(
            prompt=TokensPrompt(prompt_token_ids=prompt), sampling_params=params, request_id=f"{name} {i}"
        ):
            last = output
        assert last is not None
        return len(last.outputs[0].token_ids)

    start = time.monotonic()
    made = sum(await asyncio.gather(*[respond(i, prompt) for i, prompt in enumerate(prompts)]))
    return made / (time.monotonic() - start)
