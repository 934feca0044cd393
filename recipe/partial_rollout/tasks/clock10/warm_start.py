"""The supervised warm start: imitation of the demonstrators, two to three minutes on a CPU.

Deterministic for a seed and a thread count. Loss covers response tokens only, the end of turn included. Sequences in a
batch have like lengths: padding then stays small although the longest demonstration is twenty times the median.

The first third of the steps leaves long demonstrations out. A long one fills a batch with a single prompt, and as long
as copying and the stop rule are not learnt, such batches teach little: half-way through, with one seed, the loss was
.60 with them from the start and .29 without.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from recipe.partial_rollout.tasks.clock10.demonstration import Mixture
from recipe.partial_rollout.tasks.clock10.expression import Problem
from recipe.partial_rollout.tasks.clock10.tokenizer import PAD, TURN_END, VOCABULARY

IGNORED = -100


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Settings of the warm start."""

    steps: int = 1500
    """Optimiser steps."""
    tokens_per_step: int = 1024
    """Padded tokens a step; a single longer sequence still makes a batch."""
    pool_size: int = 512
    """Demonstrations drawn, sorted by length and cut into batches at a time."""
    short_share: float = 1 / 3
    """Share of the steps, at the start, that leave longer demonstrations than `short_length` out."""
    short_length: int = 256
    """Longest sequence of the short phase in tokens, prompt included."""
    matrix_lr: float = 0.02
    """Muon's learning rate, for the matrices inside the layers. AdamW alone takes far longer to learn to copy."""
    other_lr: float = 3e-3
    """AdamW's learning rate, for the embedding and the norms."""
    threads: int = 2
    """Torch threads while training. One and two gave bit-equal weights on one machine; others may differ."""
    mixture: Mixture = field(default_factory=Mixture)
    """Who demonstrates."""

    def lr_scale(self, step: int) -> float:
        """Share of the peak learning rate at `step`: 1 for the first half, then linearly towards 0."""
        return min(1.0, 2.0 * (self.steps - step) / self.steps)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and labels, right-padded, both `[sequences, tokens]` int64; a label of -100 carries no loss."""

    input_ids: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Encoded:
    prompt: list[int]
    response: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Iterator[Problem],
    settings: WarmStart,
    seed: int,
) -> float:
    """Train `model` in place on demonstrations for `problems`; return the mean loss of the last tenth of the steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    optimizers = _build_optimizers(model, settings)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    batches = draw_batches(tokenizer, problems, settings, random.Random(f"warm-start-{seed}"))
    losses: list[float] = []
    model.train()
    progress = tqdm(range(settings.steps), desc="warm start", unit="step", file=sys.stderr)
    for step in progress:
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group, lr in zip(optimizer.param_groups, peak, strict=True):
                group["lr"] = lr * settings.lr_scale(step)
        losses.append(_train_step(model, optimizers, next(batches)))
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    model.eval()
    torch.set_num_threads(threads)
    tail = losses[-max(1, settings.steps // 10) :]
    return sum(tail) / len(tail)


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, problems: Iterator[Problem], settings: WarmStart, rng: random.Random
) -> Iterator[Batch]:
    """Yield batches of like lengths without end, at most `tokens_per_step` padded tokens unless one sequence is longer.

    Pools drawn before batch `short_share * steps` hold no sequence above `short_length`.
    """
    drawn = 0
    while True:
        pool = [
            _encode(tokenizer, problem, settings.mixture.respond(problem, rng))
            for problem in islice(problems, settings.pool_size)
        ]
        if drawn < settings.short_share * settings.steps:
            pool = [item for item in pool if item.length <= settings.short_length]
        groups = _cut_by_length(sorted(pool, key=lambda item: item.length), settings.tokens_per_step)
        rng.shuffle(groups)
        for group in groups:
            yield _pad(group, VOCABULARY.index(PAD))
        drawn += len(groups)


def _encode(tokenizer: PreTrainedTokenizerFast, problem: Problem, response: str) -> _Encoded:
    messages = [{"role": "user", "content": problem.prompt}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(asked, str)
    return _Encoded(
        tokenizer.encode(asked, add_special_tokens=False),
        tokenizer.encode(response + TURN_END, add_special_tokens=False),
    )


def _cut_by_length(ascending: list[_Encoded], tokens: int) -> list[list[_Encoded]]:
    groups: list[list[_Encoded]] = []
    group: list[_Encoded] = []
    for item in ascending:
        # Lengths ascend, so the newcomer is what the whole group pads to.
        if group and (len(group) + 1) * item.length > tokens:
            groups.append(group)
            group = []
        group.append(item)
    return [*groups, group] if group else groups


def _pad(group: list[_Encoded], pad_id: int) -> Batch:
    shape = (len(group), max(item.length for item in group))
    input_ids = torch.full(shape, pad_id)
    labels = torch.full(shape, IGNORED)
    for row, item in enumerate(group):
        input_ids[row, : item.length] = torch.tensor(item.prompt + item.response)
        labels[row, len(item.prompt) : item.length] = torch.tensor(item.response)
    return Batch(input_ids, labels)


def _build_optimizers(model: Qwen3ForCausalLM, settings: WarmStart) -> list[torch.optim.Optimizer]:
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in inside]
    return [
        torch.optim.Muon(matrices, lr=settings.matrix_lr, momentum=0.95),
        # A short memory of squared gradients, because their size changes within a few hundred steps.
        torch.optim.AdamW(others, lr=settings.other_lr, betas=(0.9, 0.95)),
    ]


def _train_step(model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], batch: Batch) -> float:
    # Padding is on the right and attention is causal, so no response token sees a pad and no mask is needed.
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss.backward()
    with NoBfloat16():
        for optimizer in optimizers:
            optimizer.step()
    return loss.item()


class NoBfloat16(TorchFunctionMode):
    """``Tensor.bfloat16()`` copies to float32 here: for Muon, which orthogonalises in bfloat16 and has no option.

    A CPU without bfloat16 instructions multiplies such matrices 40 times slower: the warm start took 17 minutes, and 3 so.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))
