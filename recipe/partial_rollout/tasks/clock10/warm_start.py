"""The supervised warm start: imitation of the demonstrators, two to three minutes on a CPU.

Deterministic for a seed and a thread count. Loss covers response tokens only, the end of turn included. Sequences in a
batch have like lengths: padding then stays small although the longest demonstration is twenty times the median.

The first third of the steps leaves long demonstrations out. A long one fills a batch with a single prompt, and as long
as copying and the stop rule are not learnt, such batches teach little: half-way through, with one seed, the loss was
.60 with them from the start and .29 without.
"""

import random
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from recipe.partial_rollout.tasks.clock10.demonstration import Mixture
from recipe.partial_rollout.tasks.clock10.expression import Problem
from recipe.partial_rollout.tasks.clock10.tokenizer import PAD, TURN_END, VOCABULARY

IGNORED = -100
TOKENS_PER_STEP = 1024
"""Largest number of tokens in a batch, padding included; a longer sequence is a batch of its own."""
POOL_SIZE = 512
"""Demonstrations drawn, sorted by length and cut into batches at a time."""
MATRIX_LR = 0.02
"""Muon's learning rate, for the matrices inside the layers. AdamW alone takes far longer to learn to copy."""
OTHER_LR = 3e-3
"""AdamW's learning rate, for the embedding and the norms."""
THREADS = 2
"""Torch threads while training. One and two gave bit-equal weights on one machine; others may differ."""

Item = TypeVar("Item", bound=tuple[torch.Tensor, ...])
Labelled = tuple[torch.Tensor, torch.Tensor]
"""Token ids and labels, int64, of a sequence `[tokens]` or a batch `[sequences, tokens]`; a label of -100 has no loss."""


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Iterator[Problem],
    *,
    steps: int,
    seed: int,
) -> None:
    """Train `model` in place, for `steps` optimiser steps."""
    train(model, tokenizer, problems, Mixture(), steps=steps, seed=seed)


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Iterator[Problem],
    mixture: Mixture,
    *,
    steps: int,
    seed: int,
    short_share: float = 1 / 3,
    short_length: int = 256,
) -> None:
    """Train `model` in place on demonstrations for `problems`.

    Args:
        mixture: who demonstrates.
        steps: optimiser steps. The learning rates are at their peaks for half of them, then fall linearly towards 0.
        short_share: share of the steps, at the start, that leave longer demonstrations than `short_length` out.
        short_length: tokens, prompt included.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    update = updater(model, steps)
    batches = draw_batches(
        tokenizer, problems, mixture, short_share * steps, short_length, random.Random(f"warm-start-{seed}")
    )
    model.train()
    progress = tqdm(islice(batches, steps), desc="warm start", unit="step", total=steps, file=sys.stderr)
    for batch in progress:
        input_ids, labels = batch
        # Padding is on the right and attention is causal, so no response token sees a pad and no mask is needed.
        loss = next_token_loss(model(input_ids=input_ids, use_cache=False).logits, labels)
        update(loss)
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()
    torch.set_num_threads(threads)


def draw_batches(
    tokenizer: PreTrainedTokenizerFast,
    problems: Iterator[Problem],
    mixture: Mixture,
    short_batches: float,
    short_length: int,
    rng: random.Random,
) -> Iterator[Labelled]:
    """Yield batches of like lengths, right-padded, without end.

    Pools drawn before batch `short_batches` hold no sequence above `short_length`.
    """
    drawn = 0
    while True:
        pool = [_encode(tokenizer, problem, mixture.respond(problem, rng)) for problem in islice(problems, POOL_SIZE)]
        if drawn < short_batches:
            pool = [item for item in pool if len(item[0]) <= short_length]
        groups = cut_by_length(sorted(pool, key=lambda item: len(item[0])))
        rng.shuffle(groups)
        for group in groups:
            ids, labels = map(list, zip(*group, strict=True))
            yield (
                pad_sequence(ids, batch_first=True, padding_value=VOCABULARY.index(PAD)),
                pad_sequence(labels, batch_first=True, padding_value=IGNORED),
            )
        drawn += len(groups)


def _encode(tokenizer: PreTrainedTokenizerFast, problem: Problem, response: str) -> Labelled:
    messages = [{"role": "user", "content": problem.prompt}]
    prompt: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    said = tokenizer.encode(response + TURN_END, add_special_tokens=False)
    return torch.tensor(prompt + said), torch.tensor([IGNORED] * len(prompt) + said)


def cut_by_length(ascending: list[Item]) -> list[list[Item]]:
    """Cut items into groups whose sequences, padded to the longest, have at most `TOKENS_PER_STEP` tokens in total.

    A longer sequence is a group of its own. The sequence of an item is its first tensor; items come in order of length.
    """
    groups: list[list[Item]] = []
    group: list[Item] = []
    for item in ascending:
        # Lengths ascend, so the whole group would be padded to the new item.
        if group and (len(group) + 1) * len(item[0]) > TOKENS_PER_STEP:
            groups.append(group)
            group = []
        group.append(item)
    return [*groups, group] if group else groups


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of `logits` [B, L, vocabulary], each for the next of `labels` [B, L]."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def updater(module: torch.nn.Module, steps: int) -> Callable[[torch.Tensor], None]:
    """Return a function that updates `module` by a loss, for `steps` times: Muon inside the layers, AdamW for the rest."""
    matrices = [weight for name, weight in module.named_parameters() if weight.ndim == 2 and "embed" not in name]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in module.parameters() if id(weight) not in inside]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MATRIX_LR, momentum=0.95),
        # A short memory of squared gradients, because their size changes within a few hundred steps.
        torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.95)),
    ]
    schedules = [LambdaLR(each, lambda step: min(1.0, 2.0 * (steps - step) / steps)) for each in optimizers]

    def update(loss: torch.Tensor) -> None:
        module.zero_grad(set_to_none=True)
        loss.backward()
        with _NoBfloat16():
            for optimizer in optimizers:
                optimizer.step()
        for schedule in schedules:
            schedule.step()

    return update


class _NoBfloat16(TorchFunctionMode):
    """A mode in which ``Tensor.bfloat16()`` returns a float32 copy.

    Muon orthogonalises in bfloat16, and has no option to change that. A CPU without bfloat16 instructions multiplies
    such matrices 40 times slower: the warm start took 17 minutes, and takes 3 in this mode.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))
