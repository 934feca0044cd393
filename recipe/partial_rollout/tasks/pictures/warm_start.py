"""The supervised warm start, three minutes on a CPU: clock10's warm start is given eyes.

1. The language part is clock10's, as it ships.
2. The vision tower learns to turn a picture of a number into that digit's embedding, once for each of the picture's tokens.
3. The language part learns from demonstrations with pictures. A picture takes six tokens where the text had one digit,
   so without this step the model copies the wrong operands.
4. The head's rows of the placeholders, which no input reads, are turned away from every hidden state. An engine never
   samples a placeholder, but the trainer's softmax counts it.
"""

import random
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm, trange
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from recipe.partial_rollout.tasks import ready_start
from recipe.partial_rollout.tasks.clock10.demonstration import Mixture
from recipe.partial_rollout.tasks.clock10.expression import Problem
from recipe.partial_rollout.tasks.clock10.tokenizer import PAD, TURN_END
from recipe.partial_rollout.tasks.clock10.warm_start import (
    IGNORED,
    POOL_SIZE,
    cut_by_length,
    next_token_loss,
    updater,
)
from recipe.partial_rollout.tasks.pictures.dataset import prompt
from recipe.partial_rollout.tasks.pictures.model import MERGE, PIXELS
from recipe.partial_rollout.tasks.pictures.picture import CELL, SIDE, draw
from recipe.partial_rollout.tasks.pictures.tokenizer import IMAGE, VIDEO, VISION_END, VISION_START, VOCABULARY

PICTURES = 64
"""Pictures of one optimiser step of the vision tower."""
TOWER_SHARE, LANGUAGE_SHARE = 1 / 3, 1 / 4
"""Optimiser steps of the vision tower and of the language part, as shares of `warm_start`'s `steps`."""
TOKENS = (SIDE // CELL // MERGE) ** 2
"""Tokens of a picture."""
DEMONSTRATORS = Mixture(careful_share=0.2, false_accept=0.4)
"""They are less careful than clock10's, so a reward that begins low can rise within a few steps."""
PLACEHOLDERS = [VOCABULARY.index(token) for token in (IMAGE, VIDEO)]
MARGIN = 25.0
"""Nats by which placeholders are kept below the likeliest token."""

Batch = tuple[dict[str, Any], torch.Tensor]
"""Inputs of the model, and labels `[sequences, tokens]`, whose -100 has no loss."""


def warm_start(
    model: Qwen3VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    problems: Iterator[Problem],
    *,
    steps: int,
    seed: int,
) -> None:
    """Train `model` in place, with shares of `steps`, the number of optimiser steps that a text task takes."""
    take_language(model)
    _learn_to_see(model, round(steps * TOWER_SHARE), random.Random(f"pictures-{seed}"))
    batches = draw_batches(tokenizer, problems, seed)
    _learn_to_copy(model, round(steps * LANGUAGE_SHARE), batches)
    _press_placeholders(model, batches)
    model.eval()


def take_language(model: Qwen3VLForConditionalGeneration) -> None:
    """Load clock10's warm start that ships into the language part of `model`."""
    weights, *_ = ready_start.read_packed(ready_start.packed_file("clock10"))
    tensors = {name.removeprefix("model."): torch.from_numpy(weight) for name, weight in weights.items()}
    model.model.language_model.load_state_dict(tensors)


def image_processor() -> Qwen2VLImageProcessorPil:
    """Return the model's image processor, with the settings that `save_processor` writes."""
    settings: Any = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": PIXELS}
    return Qwen2VLImageProcessorPil(patch_size=CELL, temporal_patch_size=2, merge_size=MERGE, **settings)


def _learn_to_see(model: Qwen3VLForConditionalGeneration, steps: int, rng: random.Random) -> None:
    """Train the vision tower. The targets: its tokens equal the digit's embedding, its deepstack features are 0."""
    tower: Any = model.model.visual
    embedding: Any = model.get_input_embeddings().weight
    digits, processor = embedding.detach()[[VOCABULARY.index(str(digit)) for digit in range(10)]], image_processor()
    progress = trange(steps, desc="warm start of the tower", unit="step", file=sys.stderr)
    update = updater(tower, steps)
    for _ in progress:
        shown = [rng.randrange(10) for _ in range(PICTURES)]
        inputs = processor([draw(digit, rng) for digit in shown], return_tensors="pt")
        seen: Any = tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], return_dict=True)
        loss = (seen.pooler_output.view(PICTURES, TOKENS, -1) - digits[shown][:, None]).square().mean()
        loss = loss + sum(layer.square().mean() for layer in seen.deepstack_features)
        update(loss)
        progress.set_postfix(loss=f"{loss.item() / digits.square().mean().item():.3f}", refresh=False)


def _learn_to_copy(model: Qwen3VLForConditionalGeneration, steps: int, batches: Iterator[Batch]) -> None:
    """Train the language part on demonstrations; the tower, which reads without a mistake by now, stays as it is."""
    model.model.visual.requires_grad_(False)
    progress = tqdm(islice(batches, steps), desc="warm start", unit="step", total=steps, file=sys.stderr)
    update = updater(model.model.language_model, steps)
    for inputs, labels in progress:
        loss = next_token_loss(model(**inputs, use_cache=False).logits, labels)
        update(loss)
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.model.visual.requires_grad_(True)


def _press_placeholders(model: Qwen3VLForConditionalGeneration, batches: Iterator[Any], rounds: int = 300) -> None:
    """Fit the placeholders' rows of the head so that no hidden state of `batches` comes within `MARGIN` of them."""
    with torch.no_grad():
        # The state at a position predicts the next token.
        found = [(model.model(**inputs)[0][:, :-1], labels[:, 1:] != IGNORED) for inputs, labels in islice(batches, 4)]
        hidden = torch.cat([states[own] for states, own in found])
        bound = model.lm_head(hidden).amax(-1, keepdim=True) - MARGIN
    head: Any = model.get_input_embeddings().weight
    rows = (-hidden.mean(0)).repeat(len(PLACEHOLDERS), 1).requires_grad_()
    optimizer = torch.optim.Adam([rows], lr=0.05)
    for _ in range(rounds):
        optimizer.zero_grad()
        (hidden @ rows.T - bound).clamp(min=0).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        head[PLACEHOLDERS] = rows


def draw_batches(tokenizer: PreTrainedTokenizerFast, problems: Iterator[Problem], seed: int) -> Iterator[Batch]:
    """Yield batches of demonstrations of like lengths: inputs of the model, right-padded, and labels `[B, tokens]`."""
    rng, processor = random.Random(f"demonstrations-{seed}"), image_processor()
    while True:
        drawn = [(problem, DEMONSTRATORS.respond(problem, rng)) for problem in islice(problems, POOL_SIZE)]
        pool = [(*_encode(tokenizer, *each), torch.tensor(each[0].target)) for each in drawn]
        groups = cut_by_length(sorted(pool, key=lambda item: len(item[0])))
        rng.shuffle(groups)
        for group in groups:
            ids, labels, targets = map(list, zip(*group, strict=True))
            padded = pad_sequence(ids, batch_first=True, padding_value=VOCABULARY.index(PAD))
            pictures = processor([draw(int(target), rng) for target in targets], return_tensors="pt")
            inputs = {**pictures, "input_ids": padded, "mm_token_type_ids": (padded == VOCABULARY.index(IMAGE)).int()}
            yield inputs, pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def _encode(tokenizer: PreTrainedTokenizerFast, problem: Problem, response: str) -> tuple[torch.Tensor, torch.Tensor]:
    messages = [{"role": "user", "content": prompt(problem, VISION_START + IMAGE * TOKENS + VISION_END)}]
    asked: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    said = tokenizer.encode(response + TURN_END, add_special_tokens=False)
    return torch.tensor(asked + said), torch.tensor([IGNORED] * len(asked) + said)
