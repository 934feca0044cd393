"""What a hold costs: seconds until the engine stands still, and until it decodes again, with many requests running.

A step that the engine has begun is finished first, so a step's time belongs to every hold; ``beyond_step`` is the rest.
The engine core decodes in a process of its own, as in a replica's server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any, NamedTuple

from recipe.partial_rollout.engine.hold import pause, tokens_made
from tests.bench.distribution import add_engine_arguments, load_prompts

BOUND = (
    "With a kept and with an emptied KV cache, in turns. Exit code 1 if hold and resumption take more than 60 ms beyond a "
    "step of the engine."
)
BOUND_S = 0.06
_STEPS, _REPEATS = 10, 10
"""steps between two holds, which give a step's time; holds of each kind"""


class Held(NamedTuple):
    """One hold, in seconds."""

    step: float
    """of a step of the engine before it"""
    hold: float
    resume: float

    @property
    def beyond_step(self) -> float:
        return max(0.0, self.hold - self.step) + self.resume


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_engine_arguments(parser)
    parser.add_argument("--running", type=int, default=64, metavar="N", help="requests that run")


def run(options: argparse.Namespace) -> int:
    """Prints median and largest milliseconds for kept and emptied KV caches; 1 if a median is over the bound."""
    found = asyncio.run(measure(options))
    print(json.dumps({"running": options.running, **{kind: _figures(held) for kind, held in found.items()}}, indent=2))
    return int(any(statistics.median(each.beyond_step for each in held) > BOUND_S for held in found.values()))


def _figures(held: list[Held]) -> dict[str, dict[str, float]]:
    """Milliseconds."""
    columns = {name: [getattr(each, name) * 1e3 for each in held] for name in (*Held._fields, "beyond_step")}
    return {
        name: {"median": round(statistics.median(values), 1), "max": round(max(values), 1)}
        for name, values in columns.items()
    }


async def measure(options: argparse.Namespace) -> dict[str, list[Held]]:
    """Holds by kind, in turns; a pair before the first is thrown away: engines compile in it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    prompts = load_prompts(options.model, options.data, options.running)
    prompts = [prompts[i % len(prompts)] for i in range(options.running)]
    kinds = {"kept": False, "recomputed": True}
    tokens = 3 * _STEPS * len(kinds) * (_REPEATS + 1)
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=options.model,
            dtype=options.dtype,
            enforce_eager=True,
            max_model_len=max(map(len, prompts)) + tokens,
            max_num_seqs=options.running,
            skip_tokenizer_init=True,
        )
    )
    found: dict[str, list[Held]] = {kind: [] for kind in kinds}
    running = [asyncio.ensure_future(_respond(engine, i, prompt, tokens)) for i, prompt in enumerate(prompts)]
    try:
        await _everyone_has(engine, len(prompts), 1)
        for repeat in range(_REPEATS + 1):
            for kind, clear_kv in kinds.items():
                held = await _hold(engine, len(prompts), clear_kv)
                if repeat:
                    found[kind].append(held)
    finally:
        for request in running:
            request.cancel()
        await asyncio.wait(running)
        engine.shutdown()
    return found


async def _hold(engine: Any, requests: int, clear_kv: bool) -> Held:
    began = time.monotonic()
    await _everyone_has(engine, requests, _fewest(engine) + _STEPS)
    step = (time.monotonic() - began) / _STEPS
    began = time.monotonic()
    await pause(engine, clear_kv=clear_kv)
    held = time.monotonic()
    await engine.resume_generation()
    return Held(step, held - began, time.monotonic() - held)


def _fewest(engine: Any) -> int:
    return min(tokens_made(engine).values())


async def _everyone_has(engine: Any, requests: int, tokens: int) -> None:
    """Wait until each of ``requests`` requests has made ``tokens``; at most a minute."""
    async with asyncio.timeout(60):
        while len(tokens_made(engine)) < requests or _fewest(engine) < tokens:
            await asyncio.sleep(0.0005)


async def _respond(engine: Any, i: int, prompt: list[int], tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0,
        ignore_eos=True,
        max_tokens=tokens,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    async for _ in engine.generate(
        prompt=TokensPrompt(prompt_token_ids=prompt), sampling_params=params, request_id=str(i)
    ):
        pass
