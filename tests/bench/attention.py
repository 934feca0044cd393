"""Seconds of an update and of a pass over a batch, its micro-batches padded, or packed by ``verl_ext.packed_attention``.

One process, torch and transformers alone: random weights, lognormal lengths, log-probs in chunks, no optimizer. Padded
micro-batches hold samples of like length, which is more than verl does for them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, modeling_utils

from recipe.partial_rollout.tasks.clock10.model import build_config
from recipe.partial_rollout.tasks.trace_task.prepare import SHAPES, VOCABULARY
from verl_ext import packed_attention
from verl_ext.chunked_log_probs import log_probs_of_labels

BOUND = "Exit code 1 if packed micro-batches are not quicker."
_PROMPT = 64
MicroBatches = list[list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--shape", choices=("clock10", *SHAPES), default="clock10", help="of the model")
    parser.add_argument("--samples", type=int, default=192, metavar="N", help="in the batch")
    parser.add_argument("--median", type=int, default=90, metavar="N", help="tokens of a response")
    parser.add_argument("--budgets", type=int, nargs="+", default=[8192, 4096, 2048], help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="interleaved; the median counts")


def _model(shape: str, attention: str, device: str) -> torch.nn.Module:
    config = build_config()
    if shape != "clock10":
        more = {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
        config = Qwen3Config(vocab_size=VOCABULARY, **SHAPES[shape], **more)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    if device == "cuda":
        model.gradient_checkpointing_enable()
    return model.train()


def _padded(lengths: np.ndarray, budget: int) -> MicroBatches:
    batches: MicroBatches = []
    for length in sorted(lengths.tolist(), reverse=True):
        if batches and (len(batches[-1]) + 1) * batches[-1][0] <= budget:
            batches[-1].append(length)
        else:
            batches.append([length])
    return batches


def _packed(lengths: np.ndarray, budget: int) -> MicroBatches:
    batches: MicroBatches = [[]]
    for length in lengths.tolist():
        if sum(batches[-1]) + length > budget:
            batches.append([])
        batches[-1].append(length)
    return batches


def _log_probs(model: torch.nn.Module, lengths: list[int], packs: bool, device: str) -> torch.Tensor:
    ids = [torch.randint(0, 60, (length,), device=device) for length in lengths]
    flat = torch.cat(ids)
    if packs:
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        logits = model(input_ids=flat[None], position_ids=positions[None], use_cache=False).logits[0]
    else:
        rows = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        there = torch.arange(rows.shape[1], device=device) < torch.tensor(lengths, device=device)[:, None]
        logits = model(input_ids=rows, attention_mask=there.long(), use_cache=False).logits[there]
    return log_probs_of_labels(logits, flat.roll(-1))


def _seconds(work: Callable[[], None], device: str) -> float:
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def run(options: argparse.Namespace) -> int:
    """Time and print; 1 unless the quickest packed update beats the quickest padded one."""
    packed_attention.register(modeling_utils)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drawn = np.random.default_rng(0).lognormal(np.log(options.median), 0.6, options.samples)
    lengths = np.clip(drawn, 1, min(options.budgets) - _PROMPT).astype(int) + _PROMPT
    print(
        f"{lengths.sum():,} tokens in {len(lengths)} samples, longest {lengths.max()}; {device}, torch {torch.__version__}"
    )
    models = {
        packs: _model(options.shape, packed_attention.NAME if packs else "sdpa", device) for packs in (False, True)
    }
    updates: dict[tuple[bool, int], list[float]] = {}
    passes: dict[tuple[bool, int], list[float]] = {}
    for repeat in range(options.repeats + 1):
        for packs, model in models.items():
            for budget in options.budgets:
                batches = (_packed if packs else _padded)(lengths, budget)

                def update(model=model, batches=batches, packs=packs) -> None:
                    for each in batches:
                        _log_probs(model, each, packs, device).mean().backward()

                @torch.no_grad()
                def over_batch(model=model, batches=batches, packs=packs) -> None:
                    for each in batches:
                        _log_probs(model, each, packs, device)

                took = _seconds(update, device), _seconds(over_batch, device)
                model.zero_grad()
                # The first finds kernels and memory.
                if repeat:
                    updates.setdefault((packs, budget), []).append(took[0])
                    passes.setdefault((packs, budget), []).append(took[1])
    best = {}
    for (packs, budget), seconds in updates.items():
        median = statistics.median(seconds)
        best[packs] = min(median, best.get(packs, median))
        kind = "packed" if packs else "padded"
        print(
            f"{kind} {budget:>6,} tokens: update {median:.3f} s, pass {statistics.median(passes[packs, budget]):.3f} s"
        )
    print(f"packed over padded, each at its best: {best[True] / best[False]:.2f}")
    return int(best[True] >= best[False])
