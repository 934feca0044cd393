"""Measures the curve of an engine: vLLM in this process, under several loads, with short and long contexts.

Takes minutes. Each load is one burst: as many requests at once, of equal length, so that what runs beside a call is known.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve, fit
from recipe.partial_rollout.tools.table import Table

_REPLICA = 0
_LEAST_TOKEN, _MOST_TOKEN = 100, 20_000
"""ids of the random prompts, where the vocabulary has them: any tokens do, and the first are often special"""


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that started together, and their calls."""

    running: int
    context: int
    """tokens of each prompt"""
    calls: tuple[EngineCall, ...]

    @property
    def seconds(self) -> float:
        return max(call.end for call in self.calls) - min(call.start for call in self.calls)

    @property
    def tokens_per_s(self) -> float:
        """Decoded, prefill included in the time."""
        return sum(call.tokens for call in self.calls) / self.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the measurement."""
    group = parser.add_argument_group("measure the curve of an engine (--measure)")
    group.add_argument(
        "--measure",
        metavar="MODEL",
        help="run vLLM with this model under several loads, save the fitted curve to --save-curve, and plan nothing",
    )
    group.add_argument(
        "--loads", type=int, nargs="+", default=[1, 8, 32, 96, 256], metavar="N", help="requests that run at once"
    )
    group.add_argument(
        "--contexts", type=int, nargs="+", default=[64, 2048], metavar="N", help="tokens of the prompts, in turn"
    )
    group.add_argument("--decode", type=int, default=128, metavar="N", help="tokens of each response")
    group.add_argument("--dtype", default="auto", help="of the engine's weights")
    group.add_argument("--eager", action="store_true", help="no CUDA graphs: rollout.enforce_eager=True")
    group.add_argument(
        "--gpu-memory", type=float, default=0.6, metavar="SHARE", help="rollout.gpu_memory_utilization of your job"
    )


def measure(options: argparse.Namespace) -> int:
    """Measure, print how well the curve fits, and save it."""
    out = options.save_curve or Path("engine_curve.json")
    bursts, kv_tokens = asyncio.run(_drive(options))
    curve = replace(curve_of(bursts), kv_tokens=kv_tokens)
    out.write_text(json.dumps(asdict(curve), indent=2) + "\n")
    print(fit_table(bursts, curve).console())
    print(f"\nmeasured curve saved in {out}: plan with --curve {out}")
    return 0


def curve_of(bursts: Sequence[Burst]) -> EngineCurve:
    """The curve that fits the calls of all bursts.

    Raises:
        CurveError: there are fewer than two loads.
    """
    return fit(call for burst in bursts for call in burst.calls)


def decoded_lengths(longest: int) -> tuple[int, int]:
    """Response lengths of the bursts: with one length, the cost of prefill looks like that of contexts.

    >>> decoded_lengths(128)
    (16, 128)
    """
    return max(2, longest // 8), longest


def predicted_s(curve: EngineCurve, burst: Burst) -> float:
    """Seconds that ``burst`` takes by ``curve``: the prefill of all prompts, then steps over growing contexts."""
    tokens, running = max(call.tokens for call in burst.calls), burst.running
    contexts = running * (tokens * burst.context + tokens * (tokens - 1) / 2)
    decode = tokens * (curve.step_s + curve.sample_s * running) + curve.context_s * contexts
    return decode + curve.prefill_s * running * burst.context


def fit_table(bursts: Sequence[Burst], curve: EngineCurve) -> Table:
    """Seconds measured and fitted, a row a burst."""
    rows = [
        [
            f"{burst.running:,} x ({burst.context:,} + {burst.calls[0].tokens:,})",
            f"{burst.tokens_per_s:,.0f}",
            f"{burst.seconds:.2f}",
            f"{predicted_s(curve, burst):.2f}",
            f"{predicted_s(curve, burst) / burst.seconds:.2f}",
        ]
        for burst in bursts
    ]
    title = (
        f"Measured curve: a step of {curve.step_s * 1e3:.2f} ms + {curve.sample_s * 1e6:.1f} us a sample + "
        f"{curve.context_s * 1e9:.1f} ns a token of context; prefill {curve.prefill_s * 1e6:.1f} us a token"
    )
    return Table(title, ["requests x (prompt + response)", "tokens/s", "measured s", "fitted s", "ratio"], rows)


def random_prompt(draw: random.Random, tokens: int, vocabulary: int) -> list[int]:
    """``tokens`` ids below ``vocabulary``, not the first ones if there are others."""
    most = min(_MOST_TOKEN, vocabulary - 1)
    return [draw.randint(min(_LEAST_TOKEN, most // 2), most) for _ in range(tokens)]


async def _drive(options: argparse.Namespace) -> tuple[list[Burst], int | None]:
    """The bursts, after one that is thrown away, since engines compile in it; and the tokens that the KV cache holds."""
    from recipe.partial_rollout.engine.replica import kv_tokens_of

    engine = _engine(options)
    kv_tokens = kv_tokens_of(engine.vllm_config)
    most = kv_tokens or float("inf")
    # Beyond the KV cache requests queue, and the burst would measure the queue.
    loads = [
        (running, context, tokens)
        for context in options.contexts
        for running in options.loads
        for tokens in decoded_lengths(options.decode)
        if running * (context + options.decode) <= most
    ]
    try:
        await _burst(engine, max(options.loads[:2]), options.contexts[0], options.decode, "warm-up")
        return [
            await _burst(engine, running, context, tokens, f"{running} {context} {tokens}")
            for running, context, tokens in tqdm(loads, desc="loads")
        ], kv_tokens
    finally:
        engine.shutdown()


def _engine(options: argparse.Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=options.measure,
            dtype=options.dtype,
            enforce_eager=options.eager,
            max_model_len=max(options.contexts) + options.decode,
            max_num_seqs=max(options.loads),
            tensor_parallel_size=options.gpus_per_replica,
            gpu_memory_utilization=options.gpu_memory,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
    )


async def _burst(engine: Any, running: int, context: int, tokens: int, name: str) -> Burst:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    draw, vocabulary = random.Random(name), engine.vllm_config.model_config.get_vocab_size()
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=tokens, logprobs=0, detokenize=False)

    async def respond(i: int) -> EngineCall:
        prompt = TokensPrompt(prompt_token_ids=random_prompt(draw, context, vocabulary))
        start, last = time.time(), None
        async for output in engine.generate(prompt=prompt, sampling_params=params, request_id=f"{name} {i}"):
            last = output
        assert last is not None
        made = len(last.outputs[0].token_ids)
        # The prompt counts as read again: that is what tells the fit what prefill costs.
        return EngineCall(_REPLICA, start, time.time(), made, 0, resumed_tokens=context, context_tokens=context)

    return Burst(running, context, tuple(await asyncio.gather(*[respond(i) for i in range(running)])))
