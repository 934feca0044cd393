"""``python -m recipe.partial_rollout.tasks.trace_task.prepare --out DIR --shape 0.6b``: random weights, budgeted prompts.

Writes ``DIR/model`` (Qwen3 of the chosen shape, random weights, a synthetic tokenizer of exactly its vocabulary) and
``DIR/data/{train,val}.parquet`` in verl's schema. Budgets are lognormal. All samples of a prompt have its budget.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 151_936
SPECIAL = ("<pad>", "<|im_end|>", "<unk>", "\n")
"""the first tokens: verl joins the turns of a Qwen3 model with its end of turn and one newline token"""
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
}


def response_budgets(rows: int, median: int, sigma: float, cap: int, seed: int) -> np.ndarray:
    """int64 [rows]: lognormal lengths in tokens, cut at ``cap``; with a ``sigma`` of 0.6 p97 is three times ``median``."""
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, rows)
    return np.clip(lengths, 1, cap).astype(np.int64)


def write_model(directory: Path, shape: str, vocabulary: int, seed: int) -> None:
    """Random weights in bfloat16 and a tokenizer with ``vocabulary`` entries."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocabulary))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_tokens(["\n"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        num_key_value_heads=min(8, SHAPES[shape]["num_attention_heads"]),
        head_dim=128 if shape != "tiny" else 32,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        **SHAPES[shape],
    )
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


def write_data(path: Path, budgets: np.ndarray, vocabulary: int, seed: int) -> None:
    """One row a budget: 64 random words, and the budget in ``extra_info``."""
    import pandas as pd

    words = np.random.default_rng(seed).integers(len(SPECIAL), vocabulary, (len(budgets), 64))
    rows = [
        {
            "data_source": "trace",
            "prompt": [{"role": "user", "content": " ".join(f"w{i}" for i in prompt)}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i, "response_budget": int(budget)},
        }
        for i, (prompt, budget) in enumerate(zip(words, budgets, strict=True))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path)


def main(arguments: list[str] | None = None) -> int:
    """Write the data, and the model unless its folder has one already; return 0, or 2 after one line for a mistake."""
    parser = argparse.ArgumentParser(prog="python -m recipe.partial_rollout.tasks.trace_task.prepare")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--median", type=int, default=1500, help="median response tokens")
    parser.add_argument(
        "--sigma", type=float, default=0.6, help="standard deviation of the logarithm of response tokens"
    )
    parser.add_argument("--cap", type=int, default=8192, help="most response tokens")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.median >= options.cap:
        print(f"--median={options.median}: must be below --cap={options.cap}", file=sys.stderr)
        return 2
    if not (options.out / "model" / "config.json").exists():
        write_model(options.out / "model", options.shape, options.vocabulary, options.seed)
    for name, rows, seed in (("train", options.rows, 1), ("val", 16, 2)):
        budgets = response_budgets(rows, options.median, options.sigma, options.cap, options.seed + seed)
        write_data(options.out / "data" / f"{name}.parquet", budgets, options.vocabulary, options.seed + seed)
    print(f"trace task at {options.out}: Qwen3 {options.shape} shape, {options.rows} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
