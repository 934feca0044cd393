"""Groups of responses, lengths with rewards: sampled from the models of the quick starts, or made up.

``python -m tests.studies.quorum.groups MODEL DATA.parquet NAME PROMPTS SAMPLES CAP`` samples more, in one process.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from recipe.partial_rollout.tasks import reasoning_gym
from recipe.partial_rollout.tasks.clock10 import reward as clock10
from recipe.partial_rollout.tasks.clock10.demonstration import Mixture
from recipe.partial_rollout.tasks.clock10.expression import draw_problem

SAMPLED = Path(__file__).parents[1] / "results" / "quorum_groups.npz"
Responses = tuple[np.ndarray, np.ndarray]
"""lengths, tokens; rewards; both [prompts, samples]"""


def sampled(name: str, source: str = "") -> Responses:
    """Those of a model at temperature 1: ``quick``, the quick start's warm start, or ``smollm``.

    Args:
        source: end of the ``data_source`` of the prompts; empty: all.
    """
    with np.load(SAMPLED) as file:
        chosen = np.char.endswith(file[f"{name}_sources"], source)
        return file[f"{name}_lengths"][chosen].astype(int), file[f"{name}_rewards"][chosen].astype(float)


def careful() -> Responses:
    """The quick start's demonstrators in the shares that a trained policy has: four of five responses are careful."""
    rng, mixture = random.Random(0), Mixture(careful_share=0.8, max_length=1535)
    lengths, rewards = [], []
    for _ in range(192):
        problem = draw_problem(rng)
        texts = [mixture.respond(problem, rng) for _ in range(64)]
        lengths.append([len(text) + 1 for text in texts])
        rewards.append([clock10.compute_score("", text, problem.prompt) for text in texts])
    return np.array(lengths), np.array(rewards)


def made_up(slope: float = 1.2) -> Responses:
    """The planner's lognormal lengths (median 3,000, mean 3,600, cap 18,384); long responses fail more often.

    In a standard deviation of log length the odds of success fall by exp(``slope``); at the cap every response fails.
    """
    rng = np.random.default_rng(0)
    shared, own = rng.standard_normal((256, 1)), rng.standard_normal((256, 64))
    deviation = np.sqrt(0.5) * (shared + own)
    lengths = np.clip(np.rint(3000 * np.exp(0.604 * deviation)), 1, 18384).astype(int)
    succeeds = rng.random(lengths.shape) < 1 / (1 + np.exp(slope * deviation - 0.5))
    return lengths, (succeeds & (lengths < 18384)).astype(float)


def of_size(responses: Responses, n: int, seed: int = 1) -> Responses:
    """Groups of ``n``, [groups, n]: each prompt's responses dealt out in a random order."""
    lengths, rewards = responses
    prompts, samples = lengths.shape
    order = np.random.default_rng(seed).permuted(np.tile(np.arange(samples), (prompts, 1)), axis=1)
    order = order[:, : samples // n * n]
    dealt = [np.take_along_axis(each, order, axis=1).reshape(-1, n) for each in (lengths, rewards)]
    return dealt[0], dealt[1]


def _sample(model: Any, prompt: Any, eos: int, samples: int, cap: int) -> list[list[int]]:
    """``samples`` responses to one prompt; rows that have ended leave the batch."""
    import torch

    texts: list[list[int]] = [[] for _ in range(samples)]
    rows = torch.arange(samples)
    with torch.inference_mode():
        out = model(prompt, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1].expand(samples, -1)
        cache.batch_repeat_interleave(samples)
        for step in range(cap):
            tokens = torch.multinomial(torch.softmax(logits, -1), 1)[:, 0]
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                texts[row].append(token)
            kept = (tokens != eos).nonzero()[:, 0]
            if not len(kept) or step + 1 == cap:
                break
            if len(kept) < len(rows):
                rows, tokens = rows[kept], tokens[kept]
                cache.batch_select_indices(kept)
            logits = model(tokens[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
    return texts


def main() -> None:
    """Sample responses, and put them into ``SAMPLED`` under a name."""
    import pandas as pd
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "data", "name"):
        parser.add_argument(name)
    for name in ("prompts", "samples", "cap"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    score: Callable[..., Any] = clock10.compute_score if options.name == "quick" else reasoning_gym.compute_score
    untagged = {} if options.name == "quick" else {"untagged": True}
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lengths, rewards, sources = [], [], []
    for _, row in pd.read_parquet(options.data).sample(n=options.prompts, random_state=0).iterrows():
        ids = tokenizer.apply_chat_template(list(row["prompt"]), add_generation_prompt=True, return_dict=False)
        responses = _sample(model, torch.tensor([ids]), tokenizer.eos_token_id, options.samples, options.cap)
        texts = [tokenizer.decode(response, skip_special_tokens=True) for response in responses]
        truth = row["reward_model"]["ground_truth"]
        found = [score(row["data_source"], text, truth, **untagged) for text in texts]
        rewards.append([each["score"] if isinstance(each, dict) else each for each in found])
        lengths.append([len(response) for response in responses])
        sources.append(row["data_source"])
        print(f"{len(lengths)} prompts: {np.mean(lengths):.0f} tokens, reward {np.mean(rewards):.2f}", flush=True)
    kept = dict(np.load(SAMPLED)) if SAMPLED.exists() else {}
    kept[f"{options.name}_lengths"] = np.array(lengths, np.int32)
    kept[f"{options.name}_rewards"] = np.array(rewards, np.float32)
    kept[f"{options.name}_sources"] = np.array(sources)
    np.savez_compressed(SAMPLED, **kept)


if __name__ == "__main__":
    main()
