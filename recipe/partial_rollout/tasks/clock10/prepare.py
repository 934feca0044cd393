"""What the task's folder depends on: parameters, sources, and how its model is trained; ``ready_start`` builds it."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipe.partial_rollout.tasks.clock10.expression import Problem


@dataclass(frozen=True, slots=True)
class Parameters:
    """What determines the folder's content, apart from the sources."""

    seed: int = 0
    """Seed of the weights, the demonstrations and the data."""
    steps: int = 1500
    """Optimiser steps of the warm start."""
    train_rows: int = 1024
    """Rows of `train.parquet`."""
    val_rows: int = 64
    """Rows of `val.parquet`, held out from training."""
    careful_share: float = 0.30
    """Share of demonstrations that never accept a wrong line."""
    false_accept: float = 0.20
    """Probability that the other demonstrations accept a wrong line."""
    threads: int = 2
    """Torch threads of the warm start."""


TINY = Parameters(steps=60, train_rows=32, val_rows=8)
"""A model that merely loads and data that merely parses, in seconds: enough for tests of the machinery around them."""


def source_fingerprint() -> str:
    """Return a SHA-256 over the names and contents of this package's modules."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def warm_start(model: Any, tokenizer: Any, parameters: Parameters) -> None:
    """Train `model` in place."""
    from recipe.partial_rollout.tasks.clock10.demonstration import Mixture
    from recipe.partial_rollout.tasks.clock10.warm_start import WarmStart, train

    mixture = Mixture(parameters.careful_share, parameters.false_accept)
    settings = WarmStart(steps=parameters.steps, threads=parameters.threads, mixture=mixture)
    train(model, tokenizer, demonstrated(parameters), settings, parameters.seed)


def demonstrated(parameters: Parameters) -> "Iterator[Problem]":
    """The problems of the demonstrations, none of them held out for validation."""
    from recipe.partial_rollout.tasks.clock10.dataset import draw_training, draw_validation

    held_out = frozenset(draw_validation(parameters.val_rows, parameters.seed))
    return draw_training(random.Random(f"demonstrated-{parameters.seed}"), held_out)
