"""The training data as a stream of prompts, in the order and the epochs of verl's own dataloader.

Rows come from the same ``StatefulDataLoader`` that noPR iterates, so PR and noPR see the same prompts in the same
order. Both leave out the rows that do not fill the last batch of an epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe.partial_rollout.checkpoint.row_images import closed_row
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.types import Prompt


@dataclass(frozen=True, slots=True)
class TrainingSteps:
    """The steps of a training, those before a resumed checkpoint included."""

    per_epoch: int
    epochs: int
    last: int
    """at most the steps that the data suffices for, ``per_epoch * epochs``"""

    def offered(self, settings: PartialRolloutConfig) -> int:
        """Return the number of steps for which prompts are admitted.

        With ``drain`` and without dynamic sampling this is ``last``. Otherwise it is ``per_epoch * epochs``, all the
        data: without ``drain`` new groups start until the end, and dynamic sampling consumes more prompts than it
        trains. The manager limits how many groups are trained.
        """
        return self.last if settings.drain and settings.group_filter is None else self.per_epoch * self.epochs


class PromptSource:
    """Hands out prompts one by one until the training needs no more.

    Args:
        loader: verl's training dataloader; yields batches as verl's ``collate_fn`` makes them.
        total: prompts that the training will use: steps times batch.
    """

    def __init__(self, loader: StatefulDataLoader, total: int) -> None:
        self._loader = loader
        self._total = total
        self._epoch = 0
        self._position = 0
        self._rows: deque[dict[str, Any]] = deque()
        self._batches: Iterator[dict[str, Any]] | None = None

    @property
    def left(self) -> int:
        """Number of prompts that the training still needs and that are not handed out yet."""
        # By position: rows that were read ahead are not handed out yet.
        an_epochs = len(self._loader) * (self._loader.batch_size or 1)
        return max(0, self._total - self._epoch * an_epochs - self._position)

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; fewer if the training needs no more."""
        # A run that did not drain may have taken more prompts than a resumed run that drains still needs.
        return [self._next() for _ in range(min(count, self.left))]

    def state_dict(self) -> dict[str, Any]:
        """Position in the data: epoch, rows handed out, rows read ahead, and the loader's own state.

        Between two epochs the loader's state is None. The state of an exhausted loader, once loaded, would give an
        empty epoch.
        """
        return {
            "epoch": self._epoch,
            "position": self._position,
            "rows": list(self._rows),
            "loader": None if self._batches is None else without_tensors(self._loader.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``, over the same data with the same seed; before the first ``take``."""
        self._epoch, self._position, self._rows = state["epoch"], state["position"], deque(state["rows"])
        if state["loader"] is not None:
            self._loader.load_state_dict(with_tensors(state["loader"]))
            self._batches = iter(self._loader)

    def _next(self) -> Prompt:
        while not self._rows:
            self._refill()
        prompt = Prompt(f"{self._epoch}/{self._position}", self._rows.popleft())
        self._position += 1
        return prompt

    def _refill(self) -> None:
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches, None)
        if batch is None:
            if self._position == 0:
                # Otherwise ``_next`` would ask such a loader for ever.
                raise ValueError("data.train_files gives no batch: it has fewer rows than data.train_batch_size")
            self._batches = None
            self._epoch += 1
            self._position = 0
            return
        self._rows.extend(map(closed_row, rows_of(batch)))


class SlotLoader:
    """Stands in for the dataloader in verl's ``fit`` under PR: N placeholders for each step that is left.

    The prompts of a step are known only once its round is over; the agent-loop manager then fills the placeholders.

    Args:
        per_epoch: steps of an epoch.
        size: N, prompts of a batch.
        completed: returns the last step that is trained.
        exhausted: returns whether the data has ended.
    """

    def __init__(self, per_epoch: int, size: int, completed: Callable[[], int], exhausted: Callable[[], bool]) -> None:
        self._per_epoch, self._size = per_epoch, size
        self._completed, self._exhausted = completed, exhausted

    def __len__(self) -> int:
        return self._per_epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """An epoch, or what is left of the one in which the run was resumed."""
        # verl's ``fit`` goes to the epoch of the resumed step, and leaves it to the loader's state where to begin in it.
        for _ in range(self._completed() % len(self), len(self)):
            if self._exhausted():
                return
            # verl takes the length of a batch from its tensors: a placeholder needs one.
            yield {"slot": torch.arange(self._size).unsqueeze(1)}

    def state_dict(self) -> dict[str, Any]:
        """No state: the prompt source keeps the position in the data."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing: the prompt source keeps the position in the data."""


_TENSOR = "tensor of"


def without_tensors(state: Any) -> Any:
    """Return ``state`` with each tensor as a marked numpy array, so that a checkpoint can be read without torch."""
    return tree_map(lambda leaf: {_TENSOR: leaf.numpy()} if isinstance(leaf, torch.Tensor) else leaf, state)


def with_tensors(state: Any) -> Any:
    """The inverse of ``without_tensors``."""

    def was_tensor(node: Any) -> bool:
        return isinstance(node, dict) and set(node) == {_TENSOR}

    def restored(leaf: Any) -> Any:
        return torch.from_numpy(leaf[_TENSOR].copy()) if was_tensor(leaf) else leaf

    return tree_map(restored, state, is_leaf=was_tensor)


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The non-tensor fields of each row of a collated batch.

    Raises:
        RuntimeError: some rows lack a key. ``collate_fn`` puts what the others have into a shorter column, which no
        longer says whose values they are.
    """
    size = max(map(len, batch.values()))
    if short := [f"{key} {len(value)} times" for key, value in batch.items() if len(value) != size]:
        raise RuntimeError(
            f"rows of data.train_files must all have the same keys; a batch of {size} has {', '.join(short)}"
        )
    fields = {key: value for key, value in batch.items() if isinstance(value, np.ndarray)}
    return [{key: value[i] for key, value in fields.items()} for i in range(size)]
