"""The training data as a stream of prompts, in the order and the epochs of verl's own dataloader.

Rows come from the same ``StatefulDataLoader`` that noPR iterates, so both arms see the same prompts in the same order;
like there, the rows that do not fill a last batch of an epoch are left out of that epoch.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sized
from typing import Any, Protocol

import numpy as np
import torch

from recipe.partial_rollout.types import Prompt


class BatchLoader(Sized, Protocol):
    """verl's training dataloader."""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...


class PromptSource:
    """Hands out prompts one by one until the training needs no more.

    Args:
        loader: yields batches as verl's ``collate_fn`` makes them.
        total: prompts that the training will use: steps times batch.
    """

    def __init__(self, loader: BatchLoader, total: int) -> None:
        self._loader = loader
        self._left = total
        self._epoch = 0
        self._position = 0
        self._rows: deque[dict[str, Any]] = deque()
        self._batches: Iterator[dict[str, Any]] | None = None

    @property
    def open(self) -> bool:
        """Whether there are more prompts to come."""
        return self._left > 0

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; fewer when the training needs no more."""
        count = min(count, self._left)
        prompts = [self._next() for _ in range(count)]
        self._left -= count
        return prompts

    def _next(self) -> Prompt:
        while not self._rows:
            self._refill()
        prompt = Prompt(f"{self._epoch}/{self._position}", self._epoch, self._rows.popleft())
        self._position += 1
        return prompt

    def _refill(self) -> None:
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches, None)
        if batch is None:
            if self._position == 0:
                raise ValueError("data.train_files gives no batch: it has fewer rows than data.train_batch_size")
            self._batches = None
            self._epoch += 1
            self._position = 0
            return
        self._rows.extend(rows_of(batch))


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The non-tensor fields of each row of a collated batch."""
    fields = {key: value for key, value in batch.items() if isinstance(value, np.ndarray)}
    size = len(next(iter(fields.values())))
    return [{key: value[i] for key, value in fields.items()} for i in range(size)]


def prompt_identity(row: dict[str, Any]) -> str:
    """Names a dataset row by what it asks and its index in the file, alike in every run and arm."""
    digest = hashlib.sha1(repr(list(row.get("raw_prompt", []))).encode()).hexdigest()[:12]
    return f"{row.get('index', 0)}-{digest}"


class SlotLoader:
    """Stands in for the dataloader in verl's ``fit`` under PR: N empty slots a step.

    The prompts of a step are known only when its round is over; the agent-loop manager fills the slots with them.

    Args:
        steps_per_epoch: batches in an epoch of the real loader.
        batch_groups: N.
    """

    def __init__(self, steps_per_epoch: int, batch_groups: int) -> None:
        self._steps = steps_per_epoch
        self._batch_groups = batch_groups

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self._steps):
            yield {"slot": torch.arange(self._batch_groups).unsqueeze(1)}

    def state_dict(self) -> dict[str, Any]:
        """Slots carry no state: the position in the data is the prompt source's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``state_dict``."""
