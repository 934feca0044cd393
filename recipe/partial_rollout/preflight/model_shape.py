"""Sizes of a dense decoder from its ``config.json``, or by its name: parameters and bytes of keys and values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

_DENSE = ("qwen3", "qwen2", "llama", "mistral")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with gated feed-forward layers and grouped-query attention.

    >>> f"{named('Qwen/Qwen3-4B').parameters / 1e9:.2f}", named("Qwen/Qwen3-0.6B").kv_bytes // 1024
    ('4.02', 112)
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """whether input and output embeddings are one matrix"""

    @property
    def parameters(self) -> int:
        """Weights of matrices and norms; biases, of which Qwen3 has none, are left out."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        norms = 2 * self.hidden + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + norms
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values of one token, in two bytes a number."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """From ``config.json``; None for an architecture that is not of this kind."""
        if config.get("model_type") not in _DENSE:
            return None
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            return cls(
                layers=config["num_hidden_layers"],
                hidden=hidden,
                intermediate=config["intermediate_size"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                vocabulary=config["vocab_size"],
                tied=config.get("tie_word_embeddings", False),
            )
        except KeyError:
            return None


def largest_matrix(config: Mapping[str, Any]) -> int | None:
    """Numbers in the largest matrix of any decoder, embedding or feed-forward; None if its ``config.json`` lacks the sizes.

    >>> largest_matrix({"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536}) * 4 >> 20
    108
    """
    text = config.get("text_config") or config
    rows = max(text.get("vocab_size") or 0, text.get("intermediate_size") or 0)
    return rows * (text.get("hidden_size") or 0) or None


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, *, tied: bool) -> ModelShape:
    return ModelShape(layers, hidden, intermediate, heads, kv_heads, 128, 151_936, tied)


QWEN3 = {
    "0.6B": _qwen3(28, 1024, 3072, 16, 8, tied=True),
    "1.7B": _qwen3(28, 2048, 6144, 16, 8, tied=True),
    "4B": _qwen3(36, 2560, 9728, 32, 8, tied=True),
    "8B": _qwen3(36, 4096, 12_288, 32, 8, tied=False),
    "14B": _qwen3(40, 5120, 17_408, 40, 8, tied=False),
    "32B": _qwen3(64, 5120, 25_600, 64, 8, tied=False),
}
"""the dense models of arXiv:2505.09388, whose config.json is not at hand before they are downloaded"""


def named(path: str) -> ModelShape | None:
    """The shape of a Qwen3 model by the last part of its path or hub id; None for any other name."""
    found = re.fullmatch(r"Qwen3-([\d.]+B)(-[\w-]+)?", path.rstrip("/").rsplit("/", 1)[-1])
    return QWEN3.get(found[1]) if found and not re.search(r"-A\d", found[0]) else None
