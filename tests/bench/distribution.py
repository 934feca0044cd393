"""Whether a speculative proposer of the engine leaves the sampled distribution as it is.

The same prompts are sampled with and without it, and two statistics of the difference are compared with those of random
exchanges of responses between the two engines, prompt by prompt (a permutation test: nothing is assumed of the tokens).
A correct proposer passes but for a share ``_ALPHA`` of seeds; rejection sampling is exact by construction.
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

BOUND = (
    "Samples the same prompts with and without it and compares the two by a permutation test. Exit code 1 if the "
    "distributions differ."
)
_POSITIONS = 16
"""first tokens of a response whose frequencies are compared"""
_ALPHA, _DEADLINE_S = 1e-3, 900.0
"""share of correct engines that fail; seconds for an engine"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of responses A (plain) and B (with the proposer)."""

    length_p: float
    """of the largest distance between the distribution functions of response lengths (Kolmogorov-Smirnov)"""
    token_p: float
    """of the squared differences of token frequencies, over the first positions"""
    median_length: tuple[float, float]
    """tokens, of A and of B"""

    @property
    def same(self) -> bool:
        """Neither statistic speaks against one distribution, at ``_ALPHA`` for both together."""
        return min(self.length_p, self.token_p) >= _ALPHA / 2


def compare(plain: list[list[list[int]]], other: list[list[list[int]]]) -> Verdict:
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

    rng = np.random.default_rng(0)
    start = np.broadcast_to(np.arange(2 * half), lengths.shape)
    seen = statistics(start)
    rounds = round(4 / _ALPHA)
    exceeded = np.zeros(2)
    for _ in range(rounds):
        exceeded += np.array(statistics(rng.permuted(start, axis=1))) >= np.array(seen) - 1e-9
    length_p, token_p = (exceeded + 1) / (rounds + 1)
    medians = float(np.median(lengths[:, :half])), float(np.median(lengths[:, half:]))
    return Verdict(float(length_p), float(token_p), medians)


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


def in_a_process(*arguments: Any) -> list[list[list[int]]]:
    """``sample`` in a process of its own, which gives memory and threads back.

    Raises:
        TimeoutError: no responses within ``_DEADLINE_S``.
    """
    with get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(sample, arguments).get(_DEADLINE_S)
        except PoolTimeoutError as error:
            raise TimeoutError(f"the engine gave no responses within {_DEADLINE_S:g} s: fewer --prompts") from error


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
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="prompts, from the start of the data")
    parser.add_argument("--samples", type=int, default=32, metavar="N", help="samples of each prompt, from each engine")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most tokens of a response")


def speculative_config(method: str) -> dict[str, Any] | None:
    """vLLM's ``speculative_config``; None for ``none``."""
    if method == "none":
        return None
    return {
        "method": method,
        "num_speculative_tokens": 4,
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
    plain, other = (
        in_a_process(options.model, prompts, {**base, "seed": seed, "speculative": speculative_config(method)})
        for seed, method in ((1, "none"), (2, options.method))
    )
    verdict = compare(plain, other)
    print(json.dumps({"method": options.method, **asdict(verdict), "same": verdict.same}, indent=2))
    return 0 if verdict.same else 1
