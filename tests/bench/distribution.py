"""Whether a speculative proposer of the engine leaves the sampled distribution as it is.

The same prompts are sampled with and without it, and two statistics of the difference are compared with those of random
exchanges of responses between the two engines, prompt by prompt (a permutation test: nothing is assumed of the tokens).
A correct proposer passes but for a share ``alpha`` of seeds; rejection sampling is exact by construction.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from multiprocessing import TimeoutError as PoolTimeoutError
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

_POSITIONS = 16
"""first tokens of a response whose frequencies are compared"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of responses A (plain) and B (with the proposer)."""

    length_p: float
    """of the largest distance between the distribution functions of response lengths (Kolmogorov-Smirnov)"""
    token_p: float
    """of the squared differences of token frequencies, over the first positions"""
    median_length: tuple[float, float]
    """tokens, of A and of B"""
    alpha: float

    @property
    def same(self) -> bool:
        """Neither statistic speaks against one distribution, at ``alpha`` for both together."""
        return min(self.length_p, self.token_p) >= self.alpha / 2


def compare(
    plain: list[list[list[int]]], other: list[list[list[int]]], *, alpha: float = 1e-3, seed: int = 0
) -> Verdict:
    """The verdict on responses ``[prompt][sample]``, token ids each; prompts are the same in both, samples equally many."""
    lengths = np.array([[len(s) for s in a + b] for a, b in zip(plain, other, strict=True)])
    first = np.array([[_first(s) for s in a + b] for a, b in zip(plain, other, strict=True)])
    half = lengths.shape[1] // 2
    values, levels = np.unique(lengths, return_inverse=True)[0], np.unique(first)
    below = lengths[..., None] <= values
    tokens = (first[..., None] == levels).reshape(*first.shape[:2], -1)

    def statistics(order: np.ndarray) -> tuple[float, float]:
        signs = np.where(order < half, 1.0, -1.0)
        distance = np.abs(np.einsum("ps,psv->v", signs, below)).max()
        return float(distance), float((np.einsum("ps,psv->v", signs, tokens) ** 2).sum())

    rng = np.random.default_rng(seed)
    start = np.broadcast_to(np.arange(2 * half), lengths.shape)
    seen = statistics(start)
    rounds = round(4 / alpha)
    exceeded = np.zeros(2)
    for _ in range(rounds):
        exceeded += np.array(statistics(rng.permuted(start, axis=1))) >= np.array(seen) - 1e-9
    length_p, token_p = (exceeded + 1) / (rounds + 1)
    medians = float(np.median(lengths[:, :half])), float(np.median(lengths[:, half:]))
    return Verdict(float(length_p), float(token_p), medians, alpha)


def _first(sample: list[int]) -> list[int]:
    head = sample[:_POSITIONS]
    return head + [-1] * (_POSITIONS - len(head))


def sample(model: str, prompts: list[list[int]], options: dict[str, Any]) -> list[list[list[int]]]:
    """Responses ``[prompt][sample]`` of a vLLM engine in this process, at temperature 1."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        model=model,
        dtype=options["dtype"],
        enforce_eager=True,
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_num_seqs"],
        seed=options["seed"],
        speculative_config=options["speculative"],
        # a pool's process may not have children
        distributed_executor_backend="uni",
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=1.0, n=options["samples"], max_tokens=options["max_tokens"], detokenize=False)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=True)
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def in_a_process(*arguments: Any, deadline_s: float = 900.0) -> list[list[list[int]]]:
    """``sample`` in a process of its own, which gives memory and threads back.

    Raises:
        TimeoutError: no responses within ``deadline_s``.
    """
    with get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(sample, arguments).get(deadline_s)
        except PoolTimeoutError as error:
            raise TimeoutError(
                f"the engine gave no responses within {deadline_s:g} s: fewer --prompts, or a longer --timeout-s"
            ) from error


def load_prompts(model: str, data: Path, count: int) -> list[list[int]]:
    """Token ids of the first ``count`` prompts of a parquet file in verl's schema."""
    import pandas as pd
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = pd.read_parquet(data)["prompt"].head(count)
    texts = [tokenizer.apply_chat_template(list(row), add_generation_prompt=True, tokenize=False) for row in rows]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of commands that start an engine of vLLM."""
    parser.add_argument("--model", default="outputs/quickstart/task/model", metavar="DIR", help="model directory")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("outputs/quickstart/task/data/val.parquet"),
        metavar="FILE",
        help="prompts, in verl's parquet format",
    )
    parser.add_argument("--dtype", default="float32", help="of the engine's weights")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_engine_arguments(parser)
    parser.add_argument("--method", default="ngram", help="vLLM's speculative method, or none for two plain engines")
    parser.add_argument("--speculative-tokens", type=int, default=4, metavar="N", help="tokens proposed at a time")
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="prompts, from the start of the data")
    parser.add_argument("--samples", type=int, default=32, metavar="N", help="samples of each prompt, from each engine")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most tokens of a response")
    parser.add_argument("--alpha", type=float, default=1e-3, metavar="P", help="share of correct engines that fail")
    parser.add_argument("--timeout-s", type=float, default=900.0, metavar="S", help="seconds allowed for each engine")
    parser.set_defaults(run=run)


def speculative_config(method: str, tokens: int) -> dict[str, Any] | None:
    """vLLM's ``speculative_config``; None for ``none``."""
    if method == "none":
        return None
    return {
        "method": method,
        "num_speculative_tokens": tokens,
        # Matches of a single token too: a proposer that seldom proposes would pass whatever it does.
        **({"prompt_lookup_min": 1, "prompt_lookup_max": 4} if method == "ngram" else {}),
    }


def run(options: argparse.Namespace) -> int:
    """Exit code 1 when the proposer changes what is sampled."""
    prompts = load_prompts(options.model, options.data, options.prompts)
    base = {
        "dtype": options.dtype,
        "samples": options.samples,
        "max_tokens": options.max_tokens,
        "max_model_len": max(map(len, prompts)) + options.max_tokens,
        "max_num_seqs": 128,
    }
    speculative = speculative_config(options.method, options.speculative_tokens)
    plain = in_a_process(options.model, prompts, {**base, "seed": 1, "speculative": None}, deadline_s=options.timeout_s)
    other = in_a_process(
        options.model, prompts, {**base, "seed": 2, "speculative": speculative}, deadline_s=options.timeout_s
    )
    verdict = compare(plain, other, alpha=options.alpha)
    print(json.dumps({"method": options.method, **asdict(verdict), "same": verdict.same}, indent=2))
    return 0 if verdict.same else 1
