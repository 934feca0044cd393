"""The supervised warm start: clock10's warm start learns to read pictures, in two minutes on a CPU.

Loss covers response tokens, of which the ends of lines say the target. The placeholders of pictures and videos are pressed
down: an engine never samples them, and a trainer counts them.
"""

import random
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from recipe.partial_rollout.tasks import ready_start
from recipe.partial_rollout.tasks.clock10.demonstration import Mixture
from recipe.partial_rollout.tasks.clock10.expression import Problem
from recipe.partial_rollout.tasks.clock10.tokenizer import PAD, TURN_END
from recipe.partial_rollout.tasks.clock10.warm_start import IGNORED, THREADS
from recipe.partial_rollout.tasks.pictures.dataset import prompt
from recipe.partial_rollout.tasks.pictures.model import MERGE, PIXELS
from recipe.partial_rollout.tasks.pictures.picture import CELL, SIDE, draw
from recipe.partial_rollout.tasks.pictures.tokenizer import IMAGE, VIDEO, VISION_END, VISION_START, VOCABULARY

BATCH = 16
LONGEST = 96
"""Tokens of a response; a longer one is cut: clock10's weights know how a search goes on."""
VISION_LR, LANGUAGE_LR = 2e-3, 2e-4
MARGIN = 20.0
"""Nats by which the placeholders are kept below the likeliest token."""
TOKENS = (SIDE // CELL // MERGE) ** 2
"""Tokens of a picture."""


def warm_start(
    model: Qwen3VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    problems: Iterator[Problem],
    *,
    steps: int,
    seed: int,
) -> None:
    """Train `model` in place, for `steps` optimiser steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    take_language(model)
    parts = ((model.model.visual, VISION_LR), (model.model.language_model, LANGUAGE_LR))
    groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in parts]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, 2.0 * (steps - step) / steps))
    model.train()
    progress = tqdm(
        islice(draw_batches(tokenizer, problems, seed), steps), desc="warm start", total=steps, file=sys.stderr
    )
    for inputs, labels in progress:
        logits = model(**inputs, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        (loss + _placeholders(logits)).backward()
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()
    torch.set_num_threads(threads)


def take_language(model: Qwen3VLForConditionalGeneration) -> None:
    """Load clock10's warm start that ships into the language part of `model`."""
    weights, *_ = ready_start.read_packed(ready_start.packed_file("clock10"))
    tensors = {name.removeprefix("model."): torch.from_numpy(weight) for name, weight in weights.items()}
    model.model.language_model.load_state_dict(tensors)


def _placeholders(logits: torch.Tensor) -> torch.Tensor:
    """Return how far the placeholders' logits are above their bound, squared, as a mean over positions."""
    ours = logits[..., [VOCABULARY.index(token) for token in (IMAGE, VIDEO)]]
    bound = logits.detach().amax(-1, keepdim=True) - MARGIN
    return (ours - bound).clamp(min=0).square().mean()


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, problems: Iterator[Problem], seed: int
) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield batches without end: inputs of the model, right-padded, and labels `[BATCH, tokens]`."""
    rng, mixture = random.Random(f"warm-start-{seed}"), Mixture()
    processor = Qwen2VLImageProcessorPil(
        patch_size=CELL, temporal_patch_size=2, merge_size=MERGE, size=PIXELS, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    while True:
        chosen = list(islice(problems, BATCH))
        rows = [_encode(tokenizer, problem, mixture.respond(problem, rng)) for problem in chosen]
        ids, labels = map(list, zip(*rows, strict=True))
        padded = pad_sequence(ids, batch_first=True, padding_value=VOCABULARY.index(PAD))
        pictures = processor([draw(problem.target, rng) for problem in chosen], return_tensors="pt")
        inputs = {**pictures, "input_ids": padded, "mm_token_type_ids": (padded == VOCABULARY.index(IMAGE)).int()}
        yield inputs, pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def _encode(tokenizer: PreTrainedTokenizerFast, problem: Problem, response: str) -> tuple[torch.Tensor, torch.Tensor]:
    messages = [{"role": "user", "content": prompt(problem, VISION_START + IMAGE * TOKENS + VISION_END)}]
    asked: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    said = tokenizer.encode(response + TURN_END, add_special_tokens=False)[:LONGEST]
    return torch.tensor(asked + said), torch.tensor([IGNORED] * len(asked) + said)
